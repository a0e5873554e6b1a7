import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Tokens(IterableDataset):
    """Read by the main process only; Accelerate cuts each batch and sends the pieces."""

    def __init__(self, n=640):
        self.n = n

    def __iter__(self):
        g = torch.Generator().manual_seed(6)
        for _ in range(self.n):
            x = torch.randint(1, 10, (7,), generator=g)
            yield {"x": x, "y": (x % 3 == 0).sum()}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    loader = DataLoader(Tokens(), batch_size=16)
    model = nn.Sequential(nn.Embedding(10, 16), nn.Flatten(), nn.Linear(112, 64), nn.ReLU(), nn.Linear(64, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(3):
        losses = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=5, enabled=True) as local_sgd:
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                opt.zero_grad()
                accelerator.backward(loss)
                opt.step()
                local_sgd.step()
                losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        accelerator.print(f"epoch {epoch}: {mean.item():.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
