import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Engine:
    def __init__(self, model, lr):
        self.model = DDP(model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)

    def training_step(self, batch):
        src, tgt = batch
        return self.model(src, tgt)

    def fit_epoch(self, loader):
        self.model.train()
        total = 0.0
        for batch in loader:
            loss = self.training_step(batch)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item()
        return total / len(loader)
