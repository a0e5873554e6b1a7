import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sums(Dataset):
    """Predict the sum of a list of numbers."""

    def __init__(self, n=512):
        g = torch.Generator().manual_seed(0)
        self.rows = [torch.rand(int(k), generator=g) for k in torch.randint(2, 24, (n,), generator=g)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i].sum()


class Curriculum(Sampler):
    """Short rows first, in every epoch the same order. A global batch is cut into one piece per rank."""

    def __init__(self, lengths, batch_size, rank, world):
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
        size = batch_size * world
        self.batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        self.rank, self.world = rank, world

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            yield batch[self.rank :: self.world]


def collate(items):
    rows, sums = zip(*items)
    return pad_sequence(rows, batch_first=True).unsqueeze(-1), torch.stack(sums).unsqueeze(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Sums()
    sampler = Curriculum([len(r) for r in data.rows], 8, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()
