import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class UncertaintyLoss(nn.Module):
    """Kendall et al.: sum of exp(-s) * loss + s."""

    def __init__(self, tasks):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(tasks))

    def forward(self, outputs, depth, label):
        losses = torch.stack([nn.functional.mse_loss(outputs[:, 0], depth),
                              nn.functional.cross_entropy(outputs[:, 1:], label)])
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


def get_loader():
    g = torch.Generator().manual_seed(10)
    x = torch.randn(128, 8, generator=g)
    return DataLoader(TensorDataset(x, x.norm(dim=1) * 2, x[:, :3].argmax(1)), batch_size=8, shuffle=True)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    criterion = UncertaintyLoss(tasks=2)
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.02)
    loader = get_loader()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for x, depth, label in loader:
            loss = criterion(model(x), depth, label)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch} last loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
