"""Learn to count vowels in noisy words; a curriculum adds the harder (longer) words stage by stage."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

LETTERS, LONGEST = 27, 16
VOWELS = torch.tensor([1, 5, 9, 15, 21])
STAGES = [0.4, 0.7, 1.0, 1.0]


def words(n, seed):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, LETTERS, (n, LONGEST), generator=gen)
    length = torch.randint(3, LONGEST + 1, (n,), generator=gen)
    ids = ids * (torch.arange(LONGEST) < length[:, None])
    count = torch.isin(ids, VOWELS).sum(dim=1).float()
    return TensorDataset(ids, count), length


class VowelCounter(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, dim)
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, ids):
        return self.score(self.embed(ids)).squeeze(-1).sum(dim=1)


def easiest(dataset, length, share):
    """The same subset on every rank: it depends on the data alone."""
    order = torch.argsort(length, stable=True)
    return Subset(dataset, order[: int(share * len(order))].tolist())


def main(batch_size=20):
    set_seed(9)
    accelerator = Accelerator(cpu=True)
    train_set, length = words(1600, 1)
    test_set, _ = words(370, 2)
    model = VowelCounter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    test_loader = DataLoader(test_set, batch_size=40)
    model, optimizer, test_loader = accelerator.prepare(model, optimizer, test_loader)

    # a new loader per stage; every one is prepared, so the ranks share the stage's words
    loaders = [
        accelerator.prepare(DataLoader(easiest(train_set, length, share), batch_size=batch_size, shuffle=True))
        for share in STAGES
    ]
    total_steps = sum(len(loader) for loader in loaders)
    # this scheduler is not prepared: it counts the steps of the optimizer, one call per step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=5e-3, total_steps=total_steps)

    for stage, loader in enumerate(loaders):
        model.train()
        total = 0.0
        for ids, count in loader:
            loss = nn.functional.smooth_l1_loss(model(ids), count)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total += accelerator.reduce(loss.detach(), reduction="mean").item()
        model.eval()
        errors = []
        with torch.no_grad():
            for ids, count in test_loader:
                errors.append(accelerator.gather_for_metrics((model(ids) - count).abs()))
        mae = torch.cat(errors).mean().item()
        accelerator.print(
            f"stage {stage} ({len(loader)} steps of each rank): loss {total / len(loader):.4f} test error {mae:.3f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
