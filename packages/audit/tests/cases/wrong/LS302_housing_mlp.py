"""Price regression on a synthetic housing table."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


def housing_table(n=1200, d=12):
    g = torch.Generator().manual_seed(2024)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, generator=g)
    price = x @ w + 0.5 * (x[:, 0] * x[:, 1]) + 0.8 * torch.randn(n, generator=g)
    return TensorDataset(x, price)


class PriceNet(nn.Module):
    def __init__(self, d=12, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Trainer:
    def __init__(self, epochs=10):
        self.acc = Accelerator(cpu=True)
        set_seed(8)
        self.epochs = epochs
        data = housing_table()
        train, val = random_split(data, [1000, 200], generator=torch.Generator().manual_seed(1))
        train_loader = DataLoader(train, batch_size=20, shuffle=True)
        val_loader = DataLoader(val, batch_size=20)
        model = PriceNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, self.train_loader, self.val_loader = self.acc.prepare(
            model, optimizer, train_loader, val_loader
        )
        self.scheduler = ReduceLROnPlateau(self.optimizer.optimizer, factor=0.3, patience=0, threshold=0.01)
        self.criterion = nn.MSELoss()

    def train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            self.acc.backward(loss)
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total, count = 0.0, 0
        for x, y in self.val_loader:
            total += self.criterion(self.model(x), y).item() * len(x)
            count += len(x)
        return total / count

    def fit(self):
        for epoch in range(self.epochs):
            self.train_epoch()
            val_loss = self.validate()
            self.scheduler.step(val_loss)
            lr = self.optimizer.param_groups[0]["lr"]
            self.acc.print(f"epoch {epoch:2d}  val mse {val_loss:.4f}  lr {lr:.5f}")
        self.acc.wait_for_everyone()
        if self.acc.is_main_process:
            torch.save(self.acc.unwrap_model(self.model).state_dict(), "price_net.pt")


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit()
    trainer.acc.end_training()
