"""Any process may ask for the end of training; the answer is agreed on. A moving average of the weights is evaluated and saved."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

MAX_EPOCHS, TARGET = 20, 0.22


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    phi = 3.0 * r + 2 * torch.pi * y / 3 + 0.15 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * phi.cos(), r * phi.sin()], 1) * 3, y)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    train = DataLoader(spirals(960, 1), batch_size=24, shuffle=True)
    test = DataLoader(spirals(240, 2), batch_size=60)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.95))
    ce = nn.CrossEntropyLoss()

    smooth, step, done = None, 0, False
    for epoch in range(MAX_EPOCHS):
        model.train()
        for x, y in train:
            loss = ce(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            average.update_parameters(accelerator.unwrap_model(model))
            step += 1
            # this process's own view of the loss
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            if smooth < TARGET:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                done = True
                break
        if done:
            break
    print(f"process {accelerator.process_index} ends at step {step}, own smoothed loss {smooth:.3f}")

    average.eval()
    right = []
    with torch.no_grad():
        for x, y in test:
            right.append(accelerator.gather_for_metrics((average(x).argmax(1) == y).float()))
    accelerator.print(f"averaged weights: acc {torch.cat(right).mean():.3f}")
    accelerator.wait_for_everyone()
    accelerator.save(average.module.state_dict(), "average.pt")


if __name__ == "__main__":
    main()
