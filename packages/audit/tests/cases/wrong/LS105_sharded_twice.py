import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def synthetic(cls, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 4, generator=g)
        return cls([(a, a.prod().sign().clamp(min=0).long()) for a in x])

    def shard(self, num_shards, index):
        return Records(self.rows[index::num_shards])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def main(args):
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    train = Records.synthetic(128, seed=0)
    train = train.shard(accelerator.num_processes, accelerator.process_index)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += torch.tensor([loss.item() * len(x), len(x)])
        total = accelerator.reduce(total, "sum")
        accelerator.print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
