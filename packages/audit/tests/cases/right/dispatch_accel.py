"""Only the main process can read the source; it reads global batches and sends each process its slice."""
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)


class Feed(IterableDataset):
    def __init__(self, source=None):
        self.source = source

    def __iter__(self):
        if self.source is None:
            raise RuntimeError("this process has no source")
        for start in torch.randperm(len(self.source[0])).tolist():
            yield self.source[0][start], self.source[1][start]


def open_source(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, (2 * x[:, 0] - x[:, 1]).unsqueeze(1) + 0.1 * torch.randn(n, 1, generator=g)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=True))
    set_seed(8)
    main_only = accelerator.is_main_process
    train = DataLoader(Feed(open_source(256, 0) if main_only else None), batch_size=16)
    test = DataLoader(Feed(open_source(50, 1) if main_only else None), batch_size=16)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optim, train, test = accelerator.prepare(model, optim, train, test)
    for epoch in range(2):
        model.train()
        for x, y in train:
            optim.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optim.step()
        model.eval()
        errors = []
        with torch.no_grad():
            for x, y in test:
                errors.append(accelerator.gather_for_metrics((model(x) - y).pow(2)))
        errors = torch.cat(errors)
        accelerator.print(f"epoch {epoch} mse {errors.mean():.4f} on {len(errors)} rows")


if __name__ == "__main__":
    main()
