"""Level of digit sequences (their mean, in 5 steps) with a curriculum: short ones first, longer ones join later."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

LEVELS, BATCH = 5, 16
SHARES = [0.3, 0.5, 0.75, 1.0, 1.0]  # part of the (sorted) data that each epoch may use


class DigitRows(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 11, (n,), generator=g).tolist()
        self.rows = [torch.randint(0, 10, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        level = int(self.rows[i].sum()) // (2 * len(self.rows[i]))  # mean 0..9 -> 0..4
        return self.rows[i], level


def collate(items):
    lengths = torch.tensor([len(s) for s, _ in items])
    return pad_sequence([s for s, _ in items], batch_first=True), lengths, torch.tensor([y for _, y in items])


class CurriculumSampler(Sampler):
    """Shuffles the easiest share of the data (alike on all ranks) and deals it out in equal parts."""

    def __init__(self, data, rank, world, seed):
        self.order = sorted(range(len(data)), key=lambda i: (len(data.rows[i]), i))
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def admitted(self, epoch):
        n = int(SHARES[epoch] * len(self.order))
        return n - n % (self.world * BATCH)  # whole global batches only

    def steps(self, epoch):
        return self.admitted(epoch) // (self.world * BATCH)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        n = self.admitted(self.epoch)
        perm = torch.randperm(n, generator=g).tolist()
        return iter([self.order[j] for j in perm[self.rank :: self.world]])

    def __len__(self):
        return self.admitted(self.epoch) // self.world


class LevelNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(10, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, LEVELS)

    def forward(self, digits, lengths):
        packed = pack_padded_sequence(self.emb(digits), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        return self.out(h[-1])


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    hits, rows = 0, range(rank, len(data), world)
    for digits, lengths, y in DataLoader(data, batch_size=50, sampler=list(rows), collate_fn=collate):
        hits += (model.module(digits, lengths).argmax(1) == y).sum().item()
    counts = torch.tensor([hits, len(rows)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    train, test = DigitRows(1600, 1), DigitRows(301, 2)
    sampler = CurriculumSampler(train, rank, world, seed=60)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    model = DDP(LevelNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    total_steps = sum(sampler.steps(e) for e in range(len(SHARES)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / total_steps))

    for epoch in range(len(SHARES)):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for digits, lengths, y in loader:
            loss = F.cross_entropy(model(digits, lengths), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        acc = accuracy(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: {sampler.steps(epoch)} steps, loss {stats[0] / stats[1]:.4f}, test acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
