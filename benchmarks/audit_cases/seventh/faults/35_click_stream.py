"""Click-through-rate model trained from a folder of shard files, read as a stream."""
import glob
import os

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset

SHARD_DIR = "shards"
N_SHARDS, ROWS = 8, 256


def write_shards():
    os.makedirs(SHARD_DIR, exist_ok=True)
    rng = np.random.default_rng(0)
    w = rng.normal(size=16)
    for s in range(N_SHARDS):
        x = rng.normal(size=(ROWS, 16)) + 0.3 * rng.normal(size=16)
        p = 1 / (1 + np.exp(-(x @ w)))
        y = (rng.random(ROWS) < p).astype(np.float32)
        np.savez(os.path.join(SHARD_DIR, f"part-{s:03d}.npz"), x=x.astype(np.float32), y=y)


class ShardStream(IterableDataset):
    """Yields (features, click) from the .npz shards that belong to this worker."""

    def __init__(self, folder, rank, world_size, seed=0):
        self.files = sorted(glob.glob(os.path.join(folder, "*.npz")))[rank::world_size]
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        for i in rng.permutation(len(self.files)):
            with np.load(self.files[i]) as shard:
                x, y = shard["x"], shard["y"]
            for j in rng.permutation(len(y)):
                yield torch.from_numpy(x[j]), torch.tensor(y[j])


class CTR(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    if accelerator.is_main_process:
        write_shards()
    accelerator.wait_for_everyone()

    stream = ShardStream(SHARD_DIR, accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(stream, batch_size=32)
    model = CTR()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        stream.set_epoch(epoch)
        steps, losses = 0, 0.0
        for x, y in loader:
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.item()
            steps += 1
        mean = accelerator.reduce(torch.tensor(losses / steps), reduction="mean").item()
        accelerator.print(f"epoch {epoch}: log loss {mean:.4f} over {steps} steps")

    accelerator.save_model(model, "ctr_model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
