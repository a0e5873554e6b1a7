import torch
import torch.nn.functional as F
from torch import nn


class EMAQuantizer(nn.Module):
    def __init__(self, codes=16, dim=8, decay=0.95, eps=1e-5):
        super().__init__()
        self.codes, self.decay, self.eps = codes, decay, eps
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())

    @torch.no_grad()
    def update(self, flat, onehot):
        count = onehot.sum(0)
        total = onehot.t() @ flat
        self.cluster_size.mul_(self.decay).add_(count, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(total, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.codes * self.eps) * n
        self.embed.copy_(self.embed_avg / size.unsqueeze(1))

    def forward(self, z):
        index = torch.cdist(z, self.embed).argmin(1)
        quantized = self.embed[index]
        if self.training:
            self.update(z.detach(), F.one_hot(index, self.codes).type_as(z))
        commit = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commit
