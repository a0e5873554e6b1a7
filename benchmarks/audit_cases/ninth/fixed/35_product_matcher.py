"""Bi-encoder that matches queries with products, trained with a margin loss in a Trainer subclass."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

WIDTH, VOCAB = 10, 200


class Triplets(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        topics = rng.integers(0, 20, size=n)
        others = (topics + rng.integers(1, 20, size=n)) % 20

        def words(topic):
            noise = rng.integers(100, VOCAB, size=(len(topic), WIDTH))
            core = topic[:, None] * 5 + rng.integers(0, 5, size=(len(topic), WIDTH))
            return torch.from_numpy(np.where(rng.random(core.shape) < 0.4, core, noise))

        self.query, self.good, self.bad = words(topics), words(topics), words(others)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return {"query": self.query[i], "good": self.good[i], "bad": self.bad[i]}


class BiEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.project = nn.Linear(config.hidden_size, 32)

    def encode(self, ids):
        hidden = self.encoder(input_ids=ids).last_hidden_state.mean(dim=1)
        return F.normalize(self.project(hidden), dim=-1)

    def forward(self, query, good, bad):
        return self.encode(query), self.encode(good), self.encode(bad)


class MarginTrainer(Trainer):
    def __init__(self, *args, margin=0.3, **kwargs):
        super().__init__(*args, **kwargs)
        self.margin = margin

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        query, good, bad = model(inputs["query"], inputs["good"], inputs["bad"])
        gap = (query * bad).sum(-1) - (query * good).sum(-1)
        loss = F.relu(gap + self.margin).mean()
        return (loss, {"gap": gap}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs["gap"], torch.zeros_like(outputs["gap"])


def hit_rate(pred):
    return {"hit_rate": float((pred.predictions < 0).mean())}


def main():
    set_seed(3)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=WIDTH,
    )
    args = TrainingArguments(
        output_dir="out_match",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=3,
    )
    trainer = MarginTrainer(
        model=BiEncoder(config),
        args=args,
        train_dataset=Triplets(320, seed=0),
        eval_dataset=Triplets(128, seed=1),
        compute_metrics=hit_rate,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
