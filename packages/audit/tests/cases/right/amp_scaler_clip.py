import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Loop:
    def __init__(self, model, opt, accum=2, clip=1.0):
        self.model, self.opt, self.accum, self.clip = model, opt, accum, clip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def forward_backward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x).float(), y) / self.accum
        self.scaler.scale(loss).backward()
        return loss.item()

    def fit(self, loader):
        for i, (x, y) in enumerate(loader):
            if i % self.accum != self.accum - 1:
                with self.model.no_sync():
                    self.forward_backward(x, y)
                continue
            loss = self.forward_backward(x, y)
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
        return loss * self.accum


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(512, 12, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)))
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loss = loop.fit(loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} last loss on rank 0 {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
