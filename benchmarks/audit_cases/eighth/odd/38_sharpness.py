"""Sharpness-aware minimisation in a training_step of its own: two forward and backward passes for each update."""
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Textures(Dataset):
    def __init__(self, n, seed, size=10):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (n,), generator=g)
        rows = torch.arange(size).view(1, size, 1).float()
        cols = torch.arange(size).view(1, 1, size).float()
        y = self.labels.view(-1, 1, 1)
        wave = torch.where(y == 0, rows, torch.where(y == 1, cols, rows + cols))
        shift = torch.rand(n, 1, 1, generator=g) * 6.28
        self.images = torch.sin(1.6 * wave + shift) + 0.7 * torch.randn(n, size, size, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.images[i : i + 1], "labels": self.labels[i]}


class SmallCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.head = nn.Linear(24, 3)

    def forward(self, image, labels=None):
        logits = self.head(self.body(image))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class SamTrainer(Trainer):
    def __init__(self, *args, rho=0.05, **kwargs):
        super().__init__(*args, **kwargs)
        self.rho = rho

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)

        # the gradients are averaged over the processes here, so all of them climb to the same point
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        with torch.no_grad():
            climbs = [p.grad * (self.rho / norm) for p in params]
            torch._foreach_add_(params, climbs)
        model.zero_grad()

        self.accelerator.backward(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
        with torch.no_grad():
            torch._foreach_sub_(params, climbs)
        return loss.detach()


def main():
    set_seed(19)
    args = TrainingArguments(
        output_dir="runs/textures", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, eval_strategy="epoch", logging_steps=10,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=19,
    )
    trainer = SamTrainer(
        model=SmallCnn(), args=args, train_dataset=Textures(480, 1), eval_dataset=Textures(192, 2),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {scores['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
