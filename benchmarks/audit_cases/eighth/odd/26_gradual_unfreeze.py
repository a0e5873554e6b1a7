"""Transfer in three phases: head only, then the upper block too, then everything; every phase prepares the model afresh."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def signals(n, seed, classes=5):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(classes, 24, generator=torch.Generator().manual_seed(1234))
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(proto[y] + 1.2 * torch.randn(n, 24, generator=g), y)


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(24, 48), nn.GELU())
        self.upper = nn.Sequential(nn.Linear(48, 48), nn.GELU())
        self.head = nn.Linear(48, classes)

    def forward(self, x):
        return self.head(self.upper(self.lower(x)))


PHASES = [(("head",), 1e-2), (("head", "upper"), 5e-3), (("head", "upper", "lower"), 1e-3)]


def run_phase(accelerator, net, names, lr, train_set, test_set):
    for name, child in net.named_children():
        child.requires_grad_(name in names)
    params = [p for p in net.parameters() if p.requires_grad]
    model, optimizer, train, test = accelerator.prepare(
        net,
        torch.optim.AdamW(params, lr=lr),
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=64),
    )
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = []
    for x, y in test:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics((model(x).argmax(1) == y).float()))
    trained = sum(p.numel() for p in params)
    accelerator.print(f"{'+'.join(names)} ({trained} weights): acc {torch.cat(right).mean():.3f}")
    net = accelerator.unwrap_model(model)
    accelerator.free_memory()
    return net


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(64)
    train_set, test_set = signals(1024, 1), signals(256, 2)
    net = Net()
    for names, lr in PHASES:
        net = run_phase(accelerator, net, names, lr, train_set, test_set)
    accelerator.wait_for_everyone()
    accelerator.save(net.state_dict(), "transfer.pt")


if __name__ == "__main__":
    main()
