"""Heart rate from wrist PPG windows. Some recordings contain dropped samples."""
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

log = get_logger(__name__)
RATE, SECONDS = 25, 6


class PPGWindows(Dataset):
    def __init__(self, n, seed, p_dropout=0.0):
        g = torch.Generator().manual_seed(seed)
        self.bpm = 50 + 100 * torch.rand(n, generator=g)
        t = torch.arange(RATE * SECONDS) / RATE
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        self.x = torch.sin(2 * math.pi * self.bpm[:, None] / 60 * t + phase)
        self.x += 0.2 * torch.randn(self.x.shape, generator=g)
        lost = torch.rand(n, generator=g) < p_dropout
        self.x[lost, 40:60] = float("nan")

    def __len__(self):
        return len(self.bpm)

    def __getitem__(self, i):
        return self.x[i].unsqueeze(0), self.bpm[i] / 100


class HRNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 32, 9, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.features(x).abs().amax(-1)).squeeze(-1)


def train_one_epoch(accelerator, model, optimizer, loader, criterion):
    model.train()
    total = torch.zeros(2)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            log.warning(f"step {step}: loss is {loss.item()}, batch skipped", main_process_only=False)
            continue
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += torch.tensor([loss.item(), 1.0])
    accelerator.wait_for_everyone()
    total = accelerator.reduce(total, reduction="sum")
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    err = [accelerator.gather_for_metrics((model(x) - y).abs()) for x, y in loader]
    return 100 * torch.cat(err).mean().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(21)
    train = DataLoader(PPGWindows(512, 1, p_dropout=0.01), batch_size=8, shuffle=True)
    val = DataLoader(PPGWindows(96, 2), batch_size=16)
    model = HRNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    criterion = nn.SmoothL1Loss()

    for epoch in range(3):
        loss = train_one_epoch(accelerator, model, optimizer, train, criterion)
        mae = evaluate(accelerator, model, val)
        accelerator.print(f"epoch {epoch}: train loss {loss:.4f}  val MAE {mae:.1f} bpm")
    accelerator.end_training()


if __name__ == "__main__":
    main()
