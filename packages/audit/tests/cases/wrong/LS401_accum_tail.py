import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PairSums(Dataset):
    def __init__(self, n=312):
        g = torch.Generator().manual_seed(14)
        self.a = torch.randint(0, 10, (n, 2), generator=g)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.a[i], self.a[i].sum()


class SumNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 16)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 19))

    def forward(self, pair):
        return self.mlp(self.emb(pair).flatten(1))


def train(args):
    torch.manual_seed(args.seed)
    data = PairSums()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    model = DDP(SumNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ce = nn.CrossEntropyLoss()

    updates = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        t0 = time.time()
        opt.zero_grad()
        for i, (pair, total) in enumerate(loader):
            loss = ce(model(pair), total) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                opt.step()
                opt.zero_grad()
                updates += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} micro-batches, {updates} updates so far, {time.time() - t0:.1f}s")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--micro-batch", type=int, default=12)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()
