"""Local SGD: four independent steps per process, then the weights are averaged."""
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rows(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=gen)
    y = (x[:, :4].sum(1) - x[:, 4] * x[:, 5] + 0.3 * torch.randn(n, generator=gen)).unsqueeze(1)
    return TensorDataset(x, y)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(40)
    train = DataLoader(rows(1024, 1), batch_size=32, shuffle=True)
    valid = DataLoader(rows(256, 2), batch_size=64)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    mse = nn.MSELoss()

    for epoch in range(3):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
            for x, y in train:
                loss = mse(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

        model.eval()
        errors = []
        for x, y in valid:
            with torch.no_grad():
                errors.append(accelerator.gather_for_metrics((model(x) - y) ** 2))
        accelerator.print(f"epoch {epoch}: valid mse {torch.cat(errors).mean():.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "local_sgd.pt")


if __name__ == "__main__":
    main()
