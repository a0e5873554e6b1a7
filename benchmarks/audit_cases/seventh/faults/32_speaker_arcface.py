"""Speaker verification: embedding network with an additive angular margin softmax."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

N_SPEAKERS, FRAMES, MELS = 24, 20, 16


def utterances(per_speaker=40):
    g = torch.Generator().manual_seed(77)
    voice = torch.randn(N_SPEAKERS, 1, MELS, generator=g)
    y = torch.arange(N_SPEAKERS).repeat_interleave(per_speaker)
    x = voice[y] + 1.2 * torch.randn(len(y), FRAMES, MELS, generator=g)
    return x, y


class EmbeddingNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.conv = nn.Conv1d(MELS, 48, 5, padding=2)
        self.fc = nn.Linear(96, dim)

    def forward(self, x):
        h = F.relu(self.conv(x.transpose(1, 2)))
        stats = torch.cat([h.mean(-1), h.std(-1)], dim=-1)
        return self.fc(stats)


class ArcMargin(nn.Module):
    def __init__(self, dim, n_classes, s=16.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)

    def forward(self, emb, y):
        cos = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        phi = cos * self.cos_m - (1 - cos * cos).sqrt() * self.sin_m
        onehot = F.one_hot(y, cos.size(1)).bool()
        return F.cross_entropy(self.s * torch.where(onehot, phi, cos), y)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(4)

    x, y = utterances()
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True, drop_last=True)
    net = EmbeddingNet()
    margin = ArcMargin(32, N_SPEAKERS).to(accelerator.device)
    optimizer = torch.optim.SGD(
        [{"params": net.parameters()}, {"params": margin.parameters(), "weight_decay": 5e-4}],
        lr=0.05, momentum=0.9,
    )
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    for epoch in range(4):
        net.train()
        seen = []
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = margin(net(xb), yb)
            accelerator.backward(loss)
            optimizer.step()
            seen.append(accelerator.gather(loss.detach().view(1)))
        accelerator.print(f"epoch {epoch}: loss {torch.cat(seen).mean():.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(
            {"net": accelerator.unwrap_model(net).state_dict(), "margin": margin.state_dict()}, "speaker.pt"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
