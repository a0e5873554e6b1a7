"""Small CNN for seven-segment digits; validation is done with an exponential moving average of the weights."""
import copy

import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Digits(Dataset):
    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        glyphs = (torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.6).float()
        self.labels = torch.randint(10, (n,), generator=gen)
        self.images = glyphs[self.labels] + 0.9 * torch.randn(n, 1, 12, 12, generator=gen)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.images[i], "labels": self.labels[i]}


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32 * 9, 10)

    def forward(self, image, labels=None):
        logits = self.head(self.features(image).flatten(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Ema(TrainerCallback):
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        self.backup = None

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero:
            return
        for ema, p in zip(self.shadow.parameters(), model.parameters()):
            ema.lerp_(p.to(ema.device), 1 - self.decay)

    def apply_to(self, model):
        self.backup = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.shadow.state_dict())

    def restore(self, model):
        model.load_state_dict(self.backup)
        self.backup = None


class EmaTrainer(Trainer):
    def __init__(self, *args, ema, **kwargs):
        super().__init__(*args, callbacks=[ema], **kwargs)
        self.ema = ema

    def evaluate(self, *args, **kwargs):
        if self.is_world_process_zero():
            self.ema.apply_to(self.model)
        metrics = super().evaluate(*args, **kwargs)
        if self.is_world_process_zero():
            self.ema.restore(self.model)
        return metrics


def accuracy(pred):
    return {"accuracy": (pred.predictions.argmax(-1) == pred.label_ids).mean()}


def main():
    set_seed(41)
    model = DigitNet()
    args = TrainingArguments(
        output_dir="digits-ema", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, lr_scheduler_type="constant", logging_steps=10,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, seed=41,
    )
    trainer = EmaTrainer(model=model, args=args, train_dataset=Digits(640, seed=1), eval_dataset=Digits(256, seed=2),
                         compute_metrics=accuracy, ema=Ema(model))
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.ema.shadow.state_dict(), "digits_ema.pt")


if __name__ == "__main__":
    main()
