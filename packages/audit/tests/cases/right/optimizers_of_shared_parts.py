"""An encoder with two heads, each with an optimizer, and a critic whose gradients are cleared in time."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Tanh())
        self.kind, self.size = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, x, part):
        return getattr(self, part)(self.encoder(x))


def clear(optimizers):
    for optimizer in optimizers.values():
        optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model, critic = DDP(Heads(), find_unused_parameters=True), DDP(nn.Linear(3, 1))
    parts = {name: getattr(model.module, name) for name in ("encoder", "kind", "size")}
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-2) for name, part in parts.items()}
    judge = torch.optim.Adam(critic.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(14):
        x = torch.randn(16, 12, generator=generator)
        kind, size = x[:, :3].argmax(1), x.sum(1, keepdim=True)

        # the encoder adds up the gradients of both heads, and one head steps in between
        loss = F.cross_entropy(model(x, "kind"), kind)
        loss.backward()
        optimizers["kind"].step()
        optimizers["kind"].zero_grad()
        F.mse_loss(model(x, "size"), size).backward()
        optimizers["size"].step()
        optimizers["encoder"].step()
        clear(optimizers)

        # the critic's pass begins without the gradients that the model's pass leaves in it
        judge.zero_grad()
        with torch.no_grad():
            given = model.module(x, "kind").softmax(1)
        scores = critic(torch.cat([given, F.one_hot(kind, 3).float()]))
        (scores[:16].mean() - scores[16:].mean()).backward()
        judge.step()
        (-critic(model(x, "kind").softmax(1))).mean().backward()
        optimizers["encoder"].step()
        optimizers["kind"].step()
        clear(optimizers)
        if rank == 0 and step % 7 == 6:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
