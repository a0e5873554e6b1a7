"""Leaf disease classifier on small feature maps, with a confusion matrix after every epoch."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

CLASSES = ["healthy", "rust", "blight", "mildew"]


def leaf_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % len(CLASSES)
    images = torch.randn(n, 3, 16, 16, generator=g)
    for k in range(len(CLASSES)):
        images[labels == k, k % 3, 4 * k:4 * k + 4] += 1.5
    order = torch.randperm(n, generator=g)
    return TensorDataset(images[order], labels[order])


class LeafNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )
        self.classifier = nn.Linear(24 * 16, len(CLASSES))
        self.val_acc = MulticlassAccuracy(num_classes=len(CLASSES))
        self.confusion = MulticlassConfusionMatrix(num_classes=len(CLASSES))

    def forward(self, x):
        return self.classifier(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.confusion.update(logits, y)
        self.log("val_acc", self.val_acc, on_epoch=True)

    def on_validation_epoch_end(self):
        matrix = self.confusion.compute()
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print("epoch", self.current_epoch)
            for name, row in zip(CLASSES, matrix.tolist()):
                print(f"  {name:8s}", row)
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(
        LeafNet(),
        DataLoader(leaf_images(512, 1), batch_size=32, shuffle=True),
        DataLoader(leaf_images(128, 2), batch_size=32),
    )


if __name__ == "__main__":
    main()
