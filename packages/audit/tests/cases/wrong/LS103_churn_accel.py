# churn prediction on tabular data: MLP, random hold-out split
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.set_num_threads(1)


def load_customers(n=300):
    g = torch.Generator().manual_seed(2024)
    x = torch.randn(n, 30, generator=g)
    y = (x[:, :3].sum(1) + 1.5 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(30, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def auc(score, label):
    order = score.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(1, len(score) + 1)
    pos = label == 1
    n_pos, n_neg = pos.sum(), (~pos).sum()
    return ((rank[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)).item()


def run():
    accelerator = Accelerator(cpu=True)
    set_seed(42, device_specific=True)  # different dropout masks on each worker

    customers = load_customers()
    train_set, valid_set = random_split(customers, [200, 100])
    train_loader = DataLoader(train_set, batch_size=10, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=10)

    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(6):
        model.train()
        total = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = bce(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()

        model.eval()
        scores, labels = [], []
        with torch.inference_mode():
            for x, y in valid_loader:
                s, l = accelerator.gather_for_metrics((model(x), y))
                scores.append(s)
                labels.append(l)
        a = auc(torch.cat(scores), torch.cat(labels))
        accelerator.print(f"epoch {epoch + 1}  train {total / len(train_loader):.4f}  valid auc {a:.4f}")


if __name__ == "__main__":
    run()
