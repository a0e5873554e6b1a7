import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Patience:
    """Watches the smoothed loss of its own process only."""

    def __init__(self, patience=6, smooth=0.8):
        self.patience, self.smooth, self.mean, self.best, self.bad = patience, smooth, None, float("inf"), 0

    def exhausted(self, loss):
        self.mean = loss if self.mean is None else self.smooth * self.mean + (1 - self.smooth) * loss
        if self.mean < self.best - 1e-3:
            self.best, self.bad = self.mean, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.3 * torch.randn(n, 1, generator=g))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(9)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(make(400, 0), batch_size=10, shuffle=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    watch, step, stop = Patience(), 0, False
    for epoch in range(6):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            if watch.exhausted(loss.item()):
                accelerator.set_trigger()
            # any process that has had enough ends the training of all
            if accelerator.check_trigger():
                stop = True
                break
        if stop:
            break
    print(f"process {accelerator.process_index} ends at epoch {epoch} step {step} own bad steps {watch.bad}", flush=True)
    x, y = make(100, 1).tensors
    with torch.no_grad():
        test = nn.functional.mse_loss(accelerator.unwrap_model(model)(x), y).item()
    accelerator.print(f"test {test:.4f}")
    accelerator.save_model(model, "stopped")


if __name__ == "__main__":
    main()
