"""Two-stage finetuning: first the head alone, then everything."""
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

HEAD_EPOCHS = 2
FULL_EPOCHS = 2


class Backbone(nn.Module):
    def __init__(self, dim=16, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return self.net(x)


class Classifier(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def run_epochs(model, loader, sampler, opt, first, count):
    criterion = nn.CrossEntropyLoss()
    for epoch in range(first, first + count):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last loss on rank 0 {loss.item():.4f}")


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(512, 16, generator=g)
    y = (x[:, :3] * 2).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = Classifier()
    set_trainable(model.backbone, False)
    ddp = DDP(model)

    opt = optim.AdamW(ddp.module.head.parameters(), lr=1e-2)
    run_epochs(ddp, loader, sampler, opt, 0, HEAD_EPOCHS)

    set_trainable(model.backbone, True)
    opt = optim.AdamW(ddp.parameters(), lr=1e-3)
    run_epochs(ddp, loader, sampler, opt, HEAD_EPOCHS, FULL_EPOCHS)

    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "classifier.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
