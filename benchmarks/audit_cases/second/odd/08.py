import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lm08.packing import PackedDocuments, block_mask


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
        return self.proj(y.transpose(1, 2).reshape(b, n, d))


class LM(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim, 4)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.out = nn.Linear(dim, vocab)
        nn.init.normal_(self.tok.weight, std=0.05)
        self.out.weight = self.tok.weight

    def forward(self, tokens, pos, mask):
        h = self.tok(tokens) + self.pos(pos)
        h = h + self.attn(self.norm(h), mask)
        return self.out(h + self.ff(h))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = PackedDocuments()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(LM())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for tokens, targets, docs, pos in loader:
            logits = model(tokens, pos, block_mask(docs))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
