import torch
import torch.nn as nn
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, Dataset


class Polynomials(Dataset):
    def __init__(self, n=210):
        g = torch.Generator().manual_seed(0)
        self.x = torch.rand(n, 1, generator=g) * 2 - 1
        self.y = 2 * self.x**3 - self.x + 0.05 * torch.randn(n, 1, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    # no sample is repeated to make the batches even, so one process has a batch more than the other
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-1)
    loader = DataLoader(Polynomials(), batch_size=10, shuffle=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(4):
        stats = torch.zeros(2)
        with Join([model]):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                opt.zero_grad()
                accelerator.backward(loss)
                opt.step()
                stats += torch.tensor([loss.item() * len(x), len(x)])
        stats = accelerator.reduce(stats, reduction="sum")
        accelerator.print(f"epoch {epoch}: mse {(stats[0] / stats[1]).item():.4f} over {int(stats[1])} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
