"""A deep ensemble: every process trains a member of its own on all of the data; predictions are averaged."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (n,), generator=g)
    angle = 3.1416 * torch.rand(n, generator=g)
    x = torch.stack([angle.cos() + label, angle.sin() * (1 - 2 * label) + 0.4 * label], 1)
    return TensorDataset(x + 0.25 * torch.randn(n, 2, generator=g), label)


class Member(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, x):
        return self.net(x)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()

    torch.manual_seed(400 + fabric.global_rank)
    member = Member()
    optimizer = torch.optim.Adam(member.parameters(), lr=1e-2)
    train = DataLoader(moons(512, 1), batch_size=32, shuffle=True)
    x_test, y_test = moons(400, 2).tensors

    for epoch in range(EPOCHS):
        member.train()
        for x, y in train:
            loss = F.cross_entropy(member(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        member.eval()
        with torch.no_grad():
            own = member(x_test).softmax(1)
        single = (own.argmax(1) == y_test).float().mean()
        mixed = fabric.all_reduce(own.clone(), reduce_op="mean")
        together = (mixed.argmax(1) == y_test).float().mean()
        singles = fabric.all_gather(single)
        fabric.print(f"epoch {epoch}: members {[round(v, 4) for v in singles.tolist()]} ensemble {together:.4f}")

    torch.save(member.state_dict(), f"member_{fabric.global_rank}.pt")
    fabric.barrier()
    fabric.print("saved", fabric.world_size, "members")


if __name__ == "__main__":
    main()
