"""Two stage fine-tuning: first only the classifier, then the whole network."""
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = dict(lr=1e-3, backbone_lr=5e-4, epochs=4, head_epochs=1, batch_size=32, classes=6)
logger = get_logger(__name__)


def make_split(n, seed):
    proto = torch.randn(CONFIG["classes"], 3, 12, 12, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CONFIG["classes"], (n,), generator=g)
    x = proto[y] + 1.5 * torch.randn(n, 3, 12, 12, generator=g)
    return TensorDataset(x, y)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 9, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def evaluate(accelerator, model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            pred, ref = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            correct += (pred == ref).sum().item()
            total += ref.numel()
    return correct / total


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)

    train_loader = DataLoader(make_split(768, 0), batch_size=CONFIG["batch_size"], shuffle=True)
    val_loader = DataLoader(make_split(200, 1), batch_size=CONFIG["batch_size"])

    model = Classifier(CONFIG["classes"])
    set_trainable(model.backbone, False)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.head.parameters(), "lr": CONFIG["lr"]},
            {"params": model.backbone.parameters(), "lr": CONFIG["backbone_lr"]},
        ]
    )
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    for epoch in range(CONFIG["epochs"]):
        if epoch == CONFIG["head_epochs"]:
            set_trainable(accelerator.unwrap_model(model).backbone, True)
            logger.info("backbone is now trainable")
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        acc = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: val accuracy {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "finetuned.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
