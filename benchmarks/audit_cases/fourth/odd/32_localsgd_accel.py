"""Local SGD: processes step on their own and average their weights every few steps."""
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g) * 3
    k = torch.randint(0, 2, (n,), generator=g)
    a = r * 1.5 + k * 3.1416
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g), k)


def main(local_sgd_steps=4, epochs=3):
    accelerator = Accelerator(cpu=True)
    set_seed(16)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train = DataLoader(spirals(256, 0), batch_size=8, shuffle=True)
    test = DataLoader(spirals(64, 1), batch_size=8)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=True) as local_sgd:
        for epoch in range(epochs):
            model.train()
            for x, y in train:
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            model.eval()
            hits = []
            with torch.no_grad():
                for x, y in test:
                    hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
            accelerator.print(f"epoch {epoch} accuracy {torch.cat(hits).float().mean():.4f}")
    norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
    print(f"process {accelerator.process_index} |w| {norm:.6f}", flush=True)


if __name__ == "__main__":
    main()
