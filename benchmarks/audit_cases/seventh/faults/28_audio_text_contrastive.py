"""Two-tower contrastive pretraining (audio features <-> caption tokens), global in-batch negatives."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class TwoTower(nn.Module):
    def __init__(self, n_mels=20, vocab=60, dim=32):
        super().__init__()
        self.audio = nn.Sequential(nn.Linear(n_mels, 64), nn.GELU(), nn.Linear(64, dim))
        self.words = nn.EmbeddingBag(vocab, 64, mode="mean")
        self.text = nn.Sequential(nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, mel, tokens):
        a = F.normalize(self.audio(mel), dim=-1)
        t = F.normalize(self.text(self.words(tokens)), dim=-1)
        return a, t, self.logit_scale.exp()


def make_pairs(n=768):
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 60, (n, 6), generator=g)
    table = torch.randn(60, 20, generator=g)
    mel = table[tokens].mean(1) + 0.1 * torch.randn(n, 20, generator=g)
    return mel, tokens


class ContrastiveLoss(nn.Module):
    def __init__(self, accelerator):
        super().__init__()
        self.acc = accelerator

    def forward(self, a, t, scale):
        all_a = self.acc.gather(a)
        all_t = self.acc.gather(t)
        logits_a = scale * a @ all_t.T
        logits_t = scale * t @ all_a.T
        target = torch.arange(a.size(0), device=a.device) + a.size(0) * self.acc.process_index
        return 0.5 * (F.cross_entropy(logits_a, target) + F.cross_entropy(logits_t, target))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(17)
    mel, tokens = make_pairs()
    train = DataLoader(TensorDataset(mel[:640], tokens[:640]), batch_size=32, shuffle=True, drop_last=True)
    held_mel, held_tok = mel[640:], tokens[640:]

    model = TwoTower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    criterion = ContrastiveLoss(accelerator)

    for epoch in range(4):
        model.train()
        running = 0.0
        for m, w in train:
            a, t, scale = model(m, w)
            loss = criterion(a, t, scale)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            running += accelerator.reduce(loss.detach(), "mean").item()

        model.eval()
        with torch.no_grad():
            a, t, _ = accelerator.unwrap_model(model)(held_mel, held_tok)
            r1 = ((a @ t.T).argmax(1) == torch.arange(len(a))).float().mean()
        accelerator.print(f"epoch {epoch}: loss {running / len(train):.4f}  R@1 {r1:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
