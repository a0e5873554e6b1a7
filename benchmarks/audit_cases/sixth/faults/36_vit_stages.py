"""Fine-tune a ViT on texture patches in two stages: first the head alone, then the whole network."""
import torch
from torch.optim import AdamW
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

CLASSES = 4


class Textures(Dataset):
    """Gratings whose orientation decides the class."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(CLASSES, (n,), generator=g)
        angle = self.y * torch.pi / CLASSES
        yy, xx = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
        phase = torch.rand(n, generator=g) * 6.28
        wave = torch.sin(
            0.9 * (xx * angle.cos()[:, None, None] + yy * angle.sin()[:, None, None]) + phase[:, None, None]
        )
        self.x = wave[:, None].repeat(1, 3, 1, 1) + 0.6 * torch.randn(n, 3, 24, 24, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"pixel_values": self.x[i], "labels": self.y[i]}


class StageTwo(TrainerCallback):
    """Head only until `epoch`, everything from then on."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if round(state.epoch or 0) == self.epoch:
            for p in model.parameters():
                p.requires_grad = True
            if state.is_world_process_zero:
                n = sum(p.numel() for p in model.parameters() if p.requires_grad)
                print(f"stage two: {n} trainable parameters")


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(5)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=24, patch_size=6, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, num_labels=CLASSES,
        )
    )
    for p in model.vit.parameters():
        p.requires_grad = False

    optimizer = AdamW(
        [
            {"params": model.vit.parameters(), "lr": 5e-4},
            {"params": model.classifier.parameters(), "lr": 2e-3},
        ],
        weight_decay=0.01,
    )
    args = TrainingArguments(
        output_dir="vit", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, logging_steps=8, eval_strategy="epoch", save_strategy="no",
        lr_scheduler_type="constant", report_to="none", disable_tqdm=True, seed=5,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Textures(384, 0),
        eval_dataset=Textures(128, 1),
        compute_metrics=accuracy,
        optimizers=(optimizer, None),
        callbacks=[StageTwo(epoch=1)],
    )
    trainer.train()
    trainer.save_model("vit/final")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
