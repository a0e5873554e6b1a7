"""Gas sensor classification with local SGD: the ranks walk alone and average their weights every 8 steps."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed

SENSORS, GASES = 24, 4
LOCAL_STEPS = 8


def sensor_readings(n, seed):
    profile = torch.randn(GASES, SENSORS, generator=torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(seed)
    gas = torch.randint(0, GASES, (n,), generator=gen)
    strength = 0.5 + torch.rand(n, 1, generator=gen)
    readings = profile[gas] * strength + 0.8 * torch.randn(n, SENSORS, generator=gen)
    return TensorDataset(readings, gas)


class SensorNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(SENSORS, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, GASES)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hits = []
    for x, y in loader:
        hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    model.train()
    return torch.cat(hits).float().mean().item()


def main(epochs=3, batch_size=20):
    set_seed(5)
    accelerator = Accelerator(cpu=True)
    # 64 batches, 32 for each rank: an epoch is a whole number of rounds of local steps
    train_loader = DataLoader(sensor_readings(1280, 1), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(sensor_readings(320, 2), batch_size=40)
    model = SensorNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    assert len(train_loader) % LOCAL_STEPS == 0

    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_STEPS, enabled=True) as local_sgd:
        for epoch in range(epochs):
            total = torch.zeros(())
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                total += loss.detach()
            # the last step of the epoch has averaged the weights, so all ranks test the same model
            train_loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
            acc = accuracy(accelerator, model, test_loader)
            accelerator.print(f"epoch {epoch}: loss {train_loss:.4f} accuracy {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "sensor_net.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
