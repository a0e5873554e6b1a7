"""A GPT that learns the letters of a text file.

python letters.py FILE.txt
lockstep run --nproc 2 letters.py FILE.txt
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

import lockstep

batch_size, block_size = 16, 64
max_iters, warmup_iters, eval_interval = 60, 10, 20
learning_rate, min_lr, grad_clip = 1e-3, 1e-4, 1.0
n_layer, n_head, n_embd = 2, 4, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

text = Path(sys.argv[1]).read_text()
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, n_head, c // n_head).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, len(chars), bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.ln(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = torch.stack([model(*get_batch(val_data)) for _ in range(5)]).mean().item()
    model.train()
    return loss


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.1)

windows = tuple(part.unfold(0, block_size, 1) for part in (train_data[:-1], train_data[1:]))
loop = lockstep.Loop(model, optimizer, windows, global_batch=batch_size, steps=max_iters, clip_norm=grad_clip)
for step in loop:
    it = step.number - 1
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for x, y in step:
        loss = model(x, y)
        step.backward(loss)
    if (it + 1) % eval_interval == 0:
        print(f"iter {it + 1}: train {loss.item():.3f}, val {estimate_loss():.3f}")
loop.save("model.pt")
