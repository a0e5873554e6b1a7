import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Recommender(nn.Module):
    def __init__(self, items=50, d=16):
        super().__init__()
        self.items = nn.Embedding(items, d, sparse=True)
        self.mix = nn.Linear(2 * d, d, bias=False)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 1)

    def forward(self, pair):
        e = self.items(pair).flatten(1)
        return self.out(torch.relu(self.norm(self.mix(e)))).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Recommender()
    model = DDP(net)
    opts = [
        torch.optim.SparseAdam(net.items.parameters(), lr=1e-2),
        torch.optim.SGD(net.mix.parameters(), lr=0.05, momentum=0.95, nesterov=True),
        torch.optim.AdamW([*net.norm.parameters(), *net.out.parameters()], lr=3e-3),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in opts[1:]]
    g = torch.Generator().manual_seed(2)
    pairs = torch.randint(0, 50, (160, 2), generator=g)
    ds = TensorDataset(pairs, (pairs[:, 0] > pairs[:, 1]).float())
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for p, y in loader:
            for o in opts:
                o.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(p), y)
            loss.backward()
            for o in opts:
                o.step()
            for s in schedules:
                s.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / 2:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
