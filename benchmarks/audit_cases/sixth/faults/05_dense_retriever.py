"""Train a small dense retriever with in-batch negatives shared between workers."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, TOPICS = 400, 40


class QueryPassagePairs(Dataset):
    def __init__(self, n=768):
        g = torch.Generator().manual_seed(21)
        topic = torch.randint(0, TOPICS, (n,), generator=g)
        per_topic = VOCAB // TOPICS
        base = (topic * per_topic).unsqueeze(1)
        self.queries = base + torch.randint(0, per_topic, (n, 5), generator=g)
        passages = base + torch.randint(0, per_topic, (n, 16), generator=g)
        noise = torch.randint(0, VOCAB, (n, 16), generator=g)
        self.passages = torch.where(torch.rand(n, 16, generator=g) < 0.5, passages, noise)

    def __len__(self):
        return len(self.queries)

    def __getitem__(self, i):
        return self.queries[i], self.passages[i]


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.proj = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def encode(self, tokens):
        return F.normalize(self.proj(self.bag(tokens)), dim=-1)

    def forward(self, queries, passages):
        return self.encode(queries), self.encode(passages)


def gather_from_all(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=0)


def retrieval_loss(q, p, temperature):
    candidates = gather_from_all(p)
    scores = q @ candidates.t() / temperature
    target = torch.arange(len(q)) + dist.get_rank() * len(q)
    accuracy = (scores.argmax(dim=1) == target).float().mean()
    return F.cross_entropy(scores, target), accuracy


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--temperature", type=float, default=0.05)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    pairs = QueryPassagePairs()
    sampler = DistributedSampler(pairs, shuffle=True, drop_last=True)
    loader = DataLoader(pairs, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meters = torch.zeros(2)
        for queries, passages in loader:
            q, p = model(queries, passages)
            loss, accuracy = retrieval_loss(q, p, args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meters += torch.stack([loss.detach(), accuracy])
        dist.all_reduce(meters)
        meters /= world * len(loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {meters[0]:.4f} in-batch acc {meters[1]:.3f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "retriever.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
