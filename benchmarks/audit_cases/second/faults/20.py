import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rare_events(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    score = x[:, 0] + x[:, 1] + 0.8 * torch.randn(n, generator=g)
    return TensorDataset(x, (score > 2.6).float())


def f1_score(pred, target):
    tp = (pred * target).sum()
    fp = (pred * (1 - target)).sum()
    fn = ((1 - pred) * target).sum()
    return 2 * tp / (2 * tp + fp + fn + 1e-8)


def reduce_mean(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    preds, targets = [], []
    for x, y in loader:
        preds.append((model(x).squeeze(1) > 0).float())
        targets.append(y)
    model.train()
    return reduce_mean(f1_score(torch.cat(preds), torch.cat(targets))).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    train, val = rare_events(1024, 0), rare_events(192, 5)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 32, sampler=sampler)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best = 0.0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y, pos_weight=torch.tensor(4.0))
            opt.zero_grad()
            loss.backward()
            opt.step()
        f1 = evaluate(model, val_loader)
        best = max(best, f1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} f1 {f1:.4f} best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
