"""Tissue patches of changing contrast: batch norm statistics stay with the rank and are averaged for the test only."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed

SIZE, TISSUES = 12, 3


def patches(n, seed):
    pattern = torch.randn(TISSUES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(seed)
    tissue = torch.randint(0, TISSUES, (n,), generator=gen)
    gain = 0.5 + torch.rand(n, 1, 1, 1, generator=gen)
    image = gain * pattern[tissue] + 1.5 * torch.randn(n, 1, SIZE, SIZE, generator=gen)
    return TensorDataset(image, tissue)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * (SIZE // 2) ** 2, TISSUES),
    )


class averaged_statistics:
    """Within the block, all batch norms use the mean of the ranks' statistics; behind it, each rank its own."""

    def __init__(self, accelerator, module):
        self.accelerator = accelerator
        self.norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]

    def __enter__(self):
        self.own = [(m.running_mean.clone(), m.running_var.clone()) for m in self.norms]
        for m in self.norms:
            mean = self.accelerator.reduce(m.running_mean, reduction="mean")
            # variance of the mixture of the ranks, with the spread of their means
            second = self.accelerator.reduce(m.running_var + m.running_mean**2, reduction="mean")
            m.running_mean.copy_(mean)
            m.running_var.copy_(second - mean**2)

    def __exit__(self, *exc):
        for m, (mean, var) in zip(self.norms, self.own):
            m.running_mean.copy_(mean)
            m.running_var.copy_(var)


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hits = []
    with averaged_statistics(accelerator, accelerator.unwrap_model(model)):
        for image, tissue in loader:
            hits.append(accelerator.gather_for_metrics(model(image).argmax(dim=1) == tissue))
    model.train()
    return torch.cat(hits).float().mean().item()


def main(epochs=3, batch_size=24):
    set_seed(14)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    train_loader = DataLoader(patches(960, 1), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(patches(250, 2), batch_size=batch_size)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for image, tissue in train_loader:
            loss = nn.functional.cross_entropy(model(image), tissue)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.reduce(loss.detach(), reduction="mean").item()
        acc = accuracy(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {total / len(train_loader):.4f} accuracy {acc:.3f}")

    net = accelerator.unwrap_model(model)
    with averaged_statistics(accelerator, net):
        accelerator.save(net.state_dict(), "tissue.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
