"""AUC needs all scores in one place, so they are gathered, de-duplicated by index and computed on every rank."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Indexed(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 5, generator=g)
        self.y = (self.x[:, 0] + 0.5 * torch.randn(n, generator=g) > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def auc(scores, labels):
    pos, neg = scores[labels == 1], scores[labels == 0]
    return (pos[:, None] > neg[None, :]).float().mean().item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    mine = {}
    for idx, x, y in loader:
        for i, s, t in zip(idx.tolist(), model.module(x).squeeze(1).tolist(), y.tolist()):
            mine[i] = (s, t)
    model.train()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    merged = {}
    for p in parts:
        merged.update(p)
    s, t = zip(*(merged[i] for i in sorted(merged)))
    return auc(torch.tensor(s), torch.tensor(t)), len(merged)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = Indexed(384, 1), Indexed(97, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(5, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _, x, y in loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            opt.step()
        value, n = evaluate(model, val_loader)
        assert n == len(val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} AUC {value:.4f} on {n} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
