"""Contrastive sentence embeddings (question and paraphrase) with negatives from the whole batch."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.utils.data import Dataset
from transformers import RobertaConfig, RobertaModel, Trainer, TrainingArguments, set_seed

VOCAB, WIDTH = 300, 12


class Paraphrases(Dataset):
    """Two noisy views of the same bag of words."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        base = rng.integers(5, VOCAB, size=(n, WIDTH))

        def view():
            words = rng.permuted(base, axis=1)
            noise = rng.integers(5, VOCAB, size=words.shape)
            return torch.from_numpy(np.where(rng.random(words.shape) < 0.3, noise, words))

        self.left, self.right = view(), view()

    def __len__(self):
        return len(self.left)

    def __getitem__(self, i):
        return {"left": self.left[i], "right": self.right[i]}


class SentenceEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = RobertaModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 48)

    def forward(self, left, right):
        ids = torch.cat([left, right])
        hidden = self.backbone(input_ids=ids).last_hidden_state.mean(dim=1)
        return F.normalize(self.head(hidden), dim=-1).chunk(2)


class ContrastiveTrainer(Trainer):
    def __init__(self, *args, temperature=0.07, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = temperature

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        query, key = model(inputs["left"], inputs["right"])
        keys = torch.cat(all_gather(key))
        logits = query @ keys.T / self.temperature
        offset = self.accelerator.process_index * query.size(0)
        target = torch.arange(query.size(0), device=logits.device) + offset
        loss = F.cross_entropy(logits, target)
        return (loss, {"query": query, "key": key}) if return_outputs else loss


@torch.no_grad()
def retrieval_accuracy(model, pairs):
    model.eval()
    query, key = model(pairs.left, pairs.right)
    best = (query @ key.T).argmax(dim=1)
    return (best == torch.arange(len(pairs))).float().mean().item()


def main():
    set_seed(17)
    config = RobertaConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=WIDTH + 4, pad_token_id=1,
    )
    model = SentenceEncoder(config)
    args = TrainingArguments(
        output_dir="out_embed",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        warmup_steps=5,
        logging_steps=5,
        save_strategy="no",
        remove_unused_columns=False,
        dataloader_drop_last=True,
        report_to="none",
        disable_tqdm=True,
        seed=17,
    )
    trainer = ContrastiveTrainer(model=model, args=args, train_dataset=Paraphrases(1024, seed=0))
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"retrieval accuracy: {retrieval_accuracy(model, Paraphrases(256, seed=1)):.3f}")


if __name__ == "__main__":
    main()
