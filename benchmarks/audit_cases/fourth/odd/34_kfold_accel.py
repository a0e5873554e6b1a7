"""K-fold cross validation: a fresh model for each fold, out-of-fold predictions put together at the end."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.set_num_threads(1)
K = 3


def table(n=150):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 7, generator=g)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).float()
    return TensorDataset(x, y, torch.arange(n))


def run_fold(accelerator, data, train_idx, test_idx, fold):
    set_seed(100 + fold)
    model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(Subset(data, train_idx), batch_size=10, shuffle=True)
    test = DataLoader(Subset(data, test_idx), batch_size=10)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _ in range(3):
        model.train()
        for x, y, _ in train:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    out = []
    with torch.no_grad():
        for x, _, i in test:
            out.append(accelerator.gather_for_metrics((model(x), i)))
    accelerator.free_memory(model, optimizer, train, test)
    return torch.cat([p for p, _ in out]), torch.cat([i for _, i in out])


def main():
    accelerator = Accelerator(cpu=True)
    data = table()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7)).tolist()
    folds = [order[k::K] for k in range(K)]
    oof = torch.full((len(data),), float("nan"))
    for k in range(K):
        train_idx = [i for j in range(K) if j != k for i in folds[j]]
        scores, index = run_fold(accelerator, data, train_idx, folds[k], k)
        oof[index] = scores
        hit = ((scores > 0) == (data.tensors[1][index] > 0)).float().mean()
        accelerator.print(f"fold {k}: {len(index)} rows, accuracy {hit:.4f}")
    assert not oof.isnan().any()
    if accelerator.is_main_process:
        torch.save(oof, "oof.pt")
    accelerator.print(f"out of fold accuracy {((oof > 0) == (data.tensors[1] > 0)).float().mean():.4f}")


if __name__ == "__main__":
    main()
