import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, i, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def gather_with_own_gradient(accelerator, t):
    """Features of all processes; only the own part carries a gradient."""
    parts = list(accelerator.gather(t.detach()).chunk(accelerator.num_processes))
    parts[accelerator.process_index] = t
    return torch.cat(parts)


def main():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    set_seed(3)
    z = torch.randn(512, 5)
    image = z @ torch.randn(5, 20) + 0.1 * torch.randn(512, 20)
    text = z @ torch.randn(5, 16) + 0.1 * torch.randn(512, 16)
    loader = DataLoader(TensorDataset(image, text), batch_size=32, shuffle=True, drop_last=True)
    towers = Encoder(20), Encoder(16)
    opts = [torch.optim.Adam(t.parameters(), lr=2e-3) for t in towers]
    a, b, opt_a, opt_b, loader = accelerator.prepare(*towers, *opts, loader)
    world = accelerator.num_processes

    for epoch in range(3):
        total = torch.zeros(1)
        for x, y in loader:
            fa, fb = a(x), b(y)
            all_a = gather_with_own_gradient(accelerator, fa)
            all_b = gather_with_own_gradient(accelerator, fb)
            logits = all_a @ all_b.t() / 0.1
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            opt_a.zero_grad()
            opt_b.zero_grad()
            # each process has the gradient of its own features, DDP averages: give the mean back its sum
            accelerator.backward(loss * world)
            opt_a.step()
            opt_b.step()
            total += loss.detach()
        accelerator.print(f"epoch {epoch} loss {total.item() / len(loader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
