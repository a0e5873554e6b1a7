"""Digit-like classification. The running average of the weights lives on the main process only, which also
evaluates it, keeps the best file and tells the others when to stop."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def glyphs(n, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = (torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    y = torch.randint(0, 10, (n,), generator=g)
    return shapes[y].unsqueeze(1) + 0.9 * torch.randn(n, 1, 8, 8, generator=g), y


def build():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))


@torch.no_grad()
def update_ema(ema, net, decay):
    for a, b in zip(ema.parameters(), net.parameters()):
        a.lerp_(b, 1 - decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    main_process = rank == 0
    torch.manual_seed(17)

    train = TensorDataset(*glyphs(1200, seed=1))
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=30, sampler=sampler)

    model = DDP(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    if main_process:
        ema = copy.deepcopy(model.module).eval()
        x_val, y_val = glyphs(501, seed=2)
        best, bad = 0.0, 0

    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if main_process:
                update_ema(ema, model.module, decay=0.9)

        verdict = [False]
        if main_process:
            with torch.no_grad():
                acc = (ema(x_val).argmax(1) == y_val).float().mean().item()
            print(f"epoch {epoch}: accuracy of the averaged weights {acc:.4f}")
            if acc > best:
                best, bad = acc, 0
                torch.save(ema.state_dict(), "ema_best.pt")
            else:
                bad += 1
            verdict = [bad >= 2]
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0]:
            break

    if main_process:
        print(f"stopped after epoch {epoch}, best {best:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
