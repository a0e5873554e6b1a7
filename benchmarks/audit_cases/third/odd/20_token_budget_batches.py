import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self, n=120):
        rng = random.Random(1)
        self.rows = [torch.tensor([rng.randrange(1, 30) for _ in range(rng.randrange(3, 20))]) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], float(self.rows[i].float().mean() > 15)


class TokenBatches:
    def __init__(self, lengths, budget, rank, world):
        self.lengths, self.budget, self.rank, self.world, self.epoch = lengths, budget, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.epoch)
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        order.sort(key=lambda i: self.lengths[i])
        batches, batch = [], []
        for i in order:
            if batch and self.lengths[i] * (len(batch) + 1) > self.budget:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
        rng.shuffle(batches)
        while len(batches) % self.world:  # split the largest batch, so that all ranks have the same number
            big = max(range(len(batches)), key=lambda k: len(batches[k]))
            b = batches.pop(big)
            batches += [b[: len(b) // 2], b[len(b) // 2 :]]
        return iter(batches[self.rank :: self.world])


def collate(items):
    ids = pad_sequence([i for i, _ in items], batch_first=True)
    return ids, (ids > 0).float(), torch.tensor([y for _, y in items])


class MeanEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids, mask):
        e = self.emb(ids) * mask[..., None]
        return self.out(e.sum(1) / mask.sum(1, keepdim=True)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = Lines()
    batches = TokenBatches([len(r) for r in ds.rows], 96, rank, world)
    loader = DataLoader(ds, batch_sampler=batches, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(MeanEncoder())
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(2):
        batches.set_epoch(epoch)
        sums = torch.zeros(2)
        for ids, mask, y in loader:
            count = torch.tensor(float(len(y)))
            dist.all_reduce(count)
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids, mask), y, reduction="sum")
            opt.zero_grad()
            (loss * world / count).backward()
            opt.step()
            sums += torch.tensor([loss.item(), len(y)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {sums[0] / sums[1]:.4f} over {int(sums[1])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
