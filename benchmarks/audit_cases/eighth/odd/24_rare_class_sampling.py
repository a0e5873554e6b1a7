"""Rare events: every process draws its own weighted sample, with replacement, from the whole table."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = (x[:, 0] + x[:, 1] + 0.5 * torch.randn(n, generator=g) > 2.4).long()
    return TensorDataset(x, y)


class BalancedDraws(Sampler):
    """Independent draws; the stream of indices depends on the seed, the epoch and the process."""

    def __init__(self, labels, draws, seed, rank):
        counts = torch.bincount(labels).double()
        self.weights = (1.0 / counts)[labels]
        self.draws, self.seed, self.rank, self.epoch = draws, seed, rank, 0

    def __len__(self):
        return self.draws

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 1009 * self.epoch + 7919 * self.rank)
        self.epoch += 1
        yield from torch.multinomial(self.weights, self.draws, replacement=True, generator=g).tolist()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(9)
    train_set, test_set = events(2048, 1), events(512, 2)
    sampler = BalancedDraws(
        train_set.tensors[1], draws=512 // accelerator.num_processes, seed=9, rank=accelerator.process_index
    )
    train = DataLoader(train_set, batch_size=32, sampler=sampler)
    test = DataLoader(test_set, batch_size=64)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, test = accelerator.prepare(model, optimizer, test)

    for epoch in range(4):
        model.train()
        for x, y in train:
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        outs, refs = [], []
        for x, y in test:
            with torch.no_grad():
                pred = model(x).argmax(1)
            pred, y = accelerator.gather_for_metrics((pred, y))
            outs.append(pred)
            refs.append(y)
        pred, y = torch.cat(outs), torch.cat(refs)
        recalls = [(pred[y == k] == k).float().mean().item() for k in (0, 1)]
        accelerator.print(f"epoch {epoch}: recall {recalls[0]:.3f} / {recalls[1]:.3f} over {len(y)} rows")


if __name__ == "__main__":
    main()
