"""Stop when the training loss has stopped improving. The decision uses the mean over all processes, so that all of
them leave the loop at the same step."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Parity(Dataset):
    def __init__(self, n, seed, bits=6):
        g = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 2, (n, bits), generator=g)
        self.y = bits[:, :3].sum(1) % 2
        self.volts = bits * 2.0 - 1 + 0.2 * torch.randn(bits.shape, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"bits": self.volts[i], "labels": self.y[i]}


class Mlp(nn.Module):
    def __init__(self, bits=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(bits, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, bits, labels=None):
        logits = self.net(bits)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Plateau(TrainerCallback):
    def __init__(self, every=8, patience=2, min_delta=0.01):
        self.every, self.patience, self.min_delta = every, patience, min_delta
        self.window, self.best, self.bad = [], float("inf"), 0

    def add(self, loss):
        self.window.append(loss)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every:
            return
        mine = torch.tensor([sum(self.window), float(len(self.window))])
        self.window = []
        dist.all_reduce(mine)
        mean = (mine[0] / mine[1]).item()
        if mean < self.best - self.min_delta:
            self.best, self.bad = mean, 0
        else:
            self.bad += 1
        if self.bad >= self.patience or mean < 0.01:
            control.should_training_stop = True


class PlateauTrainer(Trainer):
    def __init__(self, *args, plateau, **kwargs):
        super().__init__(*args, callbacks=[plateau], **kwargs)
        self.plateau = plateau

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.plateau.add(loss.item())
        return loss


def main():
    set_seed(15)
    args = TrainingArguments(
        output_dir="runs/parity", use_cpu=True, num_train_epochs=30, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=8,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=15,
    )
    trainer = PlateauTrainer(
        plateau=Plateau(), model=Mlp(), args=args, train_dataset=Parity(512, 1), eval_dataset=Parity(128, 2)
    )
    result = trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"stopped after {result.global_step} of {trainer.state.max_steps} steps, loss {scores['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
