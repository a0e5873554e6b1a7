"""Leaf disease classification: ViT, first the head alone, then the encoder too."""
import torch
from torch.utils.data import Dataset
from transformers import (
    Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed,
)

CLASSES = ["healthy", "rust", "mildew"]


class Leaves(Dataset):
    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(len(CLASSES), (n,), generator=gen)
        self.images = torch.randn(n, 3, 32, 32, generator=gen) * 0.5
        for i, y in enumerate(self.labels.tolist()):
            spot = torch.randint(4, 24, (2,), generator=gen).tolist()
            self.images[i, y, spot[0]: spot[0] + 6, spot[1]: spot[1] + 6] += 2.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


def set_encoder_trainable(model, flag):
    for p in model.vit.parameters():
        p.requires_grad_(flag)


class GradualUnfreeze(TrainerCallback):
    """Trains the classifier for some epochs and opens the encoder afterwards."""

    def __init__(self, head_epochs=1):
        self.head_epochs = head_epochs
        self.opened = False

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if not self.opened and round(state.epoch or 0) >= self.head_epochs:
            set_encoder_trainable(model, True)
            self.opened = True
            if state.is_world_process_zero:
                n = sum(p.numel() for p in model.parameters() if p.requires_grad)
                print(f"epoch {state.epoch:.0f}: {n} trainable parameters")


def accuracy(pred):
    return {"accuracy": (pred.predictions.argmax(-1) == pred.label_ids).mean()}


def main():
    set_seed(21)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, num_labels=len(CLASSES),
        id2label=dict(enumerate(CLASSES)), label2id={c: i for i, c in enumerate(CLASSES)},
    )
    model = ViTForImageClassification(config)
    set_encoder_trainable(model, False)

    args = TrainingArguments(
        output_dir="leaf-vit", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, eval_strategy="epoch", logging_steps=8, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=21,
    )
    head, body = model.classifier.parameters(), model.vit.parameters()
    optimizer = torch.optim.AdamW([{"params": head, "lr": 3e-3}, {"params": body, "lr": 1e-3}], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    trainer = Trainer(
        model=model, args=args, train_dataset=Leaves(480, seed=1), eval_dataset=Leaves(120, seed=2),
        compute_metrics=accuracy, optimizers=(optimizer, schedule), callbacks=[GradualUnfreeze(head_epochs=1)],
    )
    trainer.train()
    trainer.save_model("leaf-vit/final")


if __name__ == "__main__":
    main()
