import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def readings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True) / 5)


def fit():
    # nothing is repeated: one process has a batch more than the other, the joined one waits
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(33)
    net = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 1))
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)
    net, opt, loader = accelerator.prepare(net, opt, DataLoader(readings(132, 0), batch_size=12, shuffle=True))
    for epoch in range(3):
        count = 0
        with Join([net]):
            for x, y in loader:
                loss = nn.functional.mse_loss(net(x), y)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
                count += len(x)
        accelerator.wait_for_everyone()
        total = accelerator.reduce(torch.tensor(count), reduction="sum").item()
        print(f"process {accelerator.process_index} epoch {epoch} loss {loss.item():.4f} own {count} all {total}", flush=True)

    with torch.no_grad():
        x, y = readings(64, 1).tensors
        accelerator.print(f"test {nn.functional.mse_loss(accelerator.unwrap_model(net)(x), y).item():.4f}")


if __name__ == "__main__":
    fit()
