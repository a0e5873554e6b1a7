import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Copy(Dataset):
    def __init__(self, n=512, length=10, vocab=12):
        g = torch.Generator().manual_seed(1)
        self.t = torch.randint(1, vocab, (n, length), generator=g)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return {"input": self.t[i], "target": self.t[i].flip(0)}


class Reverser(nn.Module):
    def __init__(self, vocab=12, dim=32, length=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(length, dim) * 0.1)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, t):
        h = self.emb(t) + self.pos
        a, _ = self.attn(h, h, h, need_weights=False)
        return self.out(h + a)


class Trainer:
    def __init__(self, accumulation=4, epochs=3):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        torch.manual_seed(0)
        self.epochs = epochs
        loader = DataLoader(Copy(), batch_size=8, shuffle=True)
        self.model, self.loader = self.accelerator.prepare(Reverser(), loader)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            logits = self.model(batch["input"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def fit(self):
        for epoch in range(self.epochs):
            losses = torch.stack([self.step(b) for b in self.loader])
            mean = self.accelerator.reduce(losses.mean(), reduction="mean")
            self.accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")
        self.accelerator.end_training()


if __name__ == "__main__":
    Trainer().fit()
