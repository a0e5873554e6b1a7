"""One encoder, two heads. Even steps train the topic head, odd steps the sentiment head."""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 50, 12


class Posts(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.topic = torch.randint(0, 4, (size,), generator=g)
        self.mood = torch.randint(0, 2, (size,), generator=g)
        self.ids = torch.randint(10, VOCAB, (size, LENGTH), generator=g)
        self.ids[:, 0] = 2 + self.topic
        self.ids[:, 5] = 6 + self.mood

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "topic": self.topic[i], "mood": self.mood[i]}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=LENGTH,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.heads = nn.ModuleDict({"topic": nn.Linear(32, 4), "mood": nn.Linear(32, 2)})

    def forward(self, input_ids, tasks):
        pooled = self.encoder(input_ids=input_ids).last_hidden_state.mean(1)
        return {task: self.heads[task](pooled) for task in tasks}


class AlternatingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            tasks = ["topic"] if self.state.global_step % 2 == 0 else ["mood"]
        else:
            tasks = ["topic", "mood"]
        logits = model(inputs["input_ids"], tasks)
        loss = sum(F.cross_entropy(logits[t], inputs[t]) for t in tasks)
        return (loss, logits) if return_outputs else loss


def accuracies(pred):
    pairs = zip(("topic", "mood"), pred.predictions, pred.label_ids)
    return {name: float(np.mean(p.argmax(-1) == y)) for name, p, y in pairs}


def main():
    set_seed(14)
    args = TrainingArguments(
        output_dir="heads",
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        ddp_find_unused_parameters=True,
        remove_unused_columns=False,
        label_names=["topic", "mood"],
        logging_steps=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = AlternatingTrainer(
        model=TwoHeads(), args=args, train_dataset=Posts(512, 0), eval_dataset=Posts(128, 1),
        compute_metrics=accuracies,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"topic {metrics['eval_topic']:.3f}  mood {metrics['eval_mood']:.3f}")


if __name__ == "__main__":
    main()
