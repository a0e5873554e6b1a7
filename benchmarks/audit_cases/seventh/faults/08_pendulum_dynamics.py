"""Learn pendulum dynamics; gradients are averaged by hand over the ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def simulate(n, g):
    angle = (torch.rand(n, generator=g) * 2 - 1) * 3.14
    speed = torch.randn(n, generator=g)
    torque = torch.randn(n, generator=g)
    state = torch.stack([angle.sin(), angle.cos(), speed, torque], dim=1)
    for _ in range(5):
        speed = speed + 0.05 * (-9.81 * angle.sin() + torque - 0.1 * speed)
        angle = angle + 0.05 * speed
    return state, torch.stack([angle.sin(), angle.cos(), speed], dim=1)


class Dynamics(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 3))

    def forward(self, s):
        return s[:, :3] + self.net(s)


class GradientAverager:
    """Flattens the gradients into one buffer, so that a step needs one message."""

    def __init__(self, params):
        self.params = [p for p in params if p.requires_grad]
        self.buffer = torch.zeros(sum(p.numel() for p in self.params))
        self.world = dist.get_world_size()

    def broadcast_parameters(self):
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def __call__(self):
        offset = 0
        for p in self.params:
            self.buffer[offset:offset + p.numel()].copy_(p.grad.view(-1))
            offset += p.numel()
        dist.all_reduce(self.buffer, op=dist.ReduceOp.SUM, async_op=True)
        self.buffer.div_(self.world)
        offset = 0
        for p in self.params:
            p.grad.copy_(self.buffer[offset:offset + p.numel()].view_as(p))
            offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    states, targets = simulate(2048, torch.Generator().manual_seed(0))
    states, targets = states[rank::world], targets[rank::world]

    torch.manual_seed(0)
    model = Dynamics()
    average_gradients = GradientAverager(model.parameters())
    average_gradients.broadcast_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    order = torch.Generator().manual_seed(1)
    for epoch in range(3):
        perm = torch.randperm(len(states), generator=order)
        total = torch.zeros(1)
        for idx in perm.split(64):
            loss = F.mse_loss(model(states[idx]), targets[idx])
            optimizer.zero_grad()
            loss.backward()
            average_gradients()
            optimizer.step()
            total += loss.detach() * len(idx)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / (len(states) * world):.4f}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), "dynamics.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
