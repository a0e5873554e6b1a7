import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed

SYNC_EVERY = 8


def teacher_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(10, 3, generator=torch.Generator().manual_seed(4))
    x = torch.randn(n, 10, generator=g)
    y = (torch.tanh(x @ w) + 0.05 * torch.randn(n, 3, generator=g)).argmax(1)
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    correct = total = 0
    for x, y in loader:
        pred, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
        correct += (pred == y).sum().item()
        total += len(y)
    model.train()
    return correct / total


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(6)
    train_loader = DataLoader(teacher_data(2048, 0), batch_size=16, shuffle=True, drop_last=True)
    test_loader = DataLoader(teacher_data(301, 1), batch_size=64)
    model = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    criterion = nn.CrossEntropyLoss()

    for epoch in range(3):
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=SYNC_EVERY) as local_sgd:
            for x, y in train_loader:
                loss = criterion(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        acc = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch} accuracy {acc:.3f}")

    accelerator.save(accelerator.unwrap_model(model).state_dict(), "student.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
