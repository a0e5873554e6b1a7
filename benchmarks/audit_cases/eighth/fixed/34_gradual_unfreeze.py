"""Fine-tune an image encoder: the new head is trained alone in the first epoch, the whole network afterwards."""
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

SIZE, CLASSES = 12, 4


class Blobs(Dataset):
    """Images with one bright blob; the label is its quadrant."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        pos = torch.rand(n, 2, generator=g) * (SIZE - 1)
        grid = torch.arange(SIZE).float()
        dy = (grid.view(1, SIZE, 1) - pos[:, 0].view(-1, 1, 1)) ** 2
        dx = (grid.view(1, 1, SIZE) - pos[:, 1].view(-1, 1, 1)) ** 2
        self.images = torch.exp(-(dy + dx) / 4) + 0.3 * torch.randn(n, SIZE, SIZE, generator=g)
        high = pos > (SIZE - 1) / 2
        self.labels = high[:, 0].long() * 2 + high[:, 1].long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.images[i].flatten(), "labels": self.labels[i]}


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIZE * SIZE, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixels, labels=None):
        logits = self.head(self.encoder(pixels))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class GradualUnfreeze(TrainerCallback):
    def __init__(self, start_epoch=1):
        self.start_epoch = start_epoch

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.epoch < self.start_epoch:
            for p in model.encoder.parameters():
                p.grad = None


def main():
    set_seed(21)
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.encoder.parameters(), "lr": 1e-3},
            {"params": model.head.parameters(), "lr": 4e-3},
        ],
        weight_decay=0.01,
    )
    args = TrainingArguments(
        output_dir="runs/blobs",
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        max_grad_norm=0.0,
        eval_strategy="epoch",
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=21,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Blobs(512, 1),
        eval_dataset=Blobs(128, 2),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        optimizers=(optimizer, None),
        callbacks=[GradualUnfreeze(start_epoch=1)],
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {scores['eval_accuracy']:.3f}  loss {scores['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
