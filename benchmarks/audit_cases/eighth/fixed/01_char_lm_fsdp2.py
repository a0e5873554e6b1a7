"""Character-level language model, sharded with FSDP2."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BLOCK = 32
DIM = 64
EPOCHS = 3


def make_text(n_sentences=600):
    rng = random.Random(7)
    who = ["the baker", "a sailor", "my aunt", "the judge", "one child"]
    does = ["paints", "repairs", "forgets", "carries", "sells"]
    what = ["a red boat", "two clocks", "the old map", "some bread", "a lantern"]
    return " ".join(f"{rng.choice(who)} {rng.choice(does)} {rng.choice(what)}." for _ in range(n_sentences))


class CharBlocks(Dataset):
    def __init__(self, text):
        chars = sorted(set(text))
        table = {c: i for i, c in enumerate(chars)}
        self.vocab_size = len(chars)
        self.ids = torch.tensor([table[c] for c in text])

    def __len__(self):
        return (len(self.ids) - 1) // BLOCK

    def __getitem__(self, i):
        chunk = self.ids[i * BLOCK : i * BLOCK + BLOCK + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, vocab_size, dim=DIM, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, dim)
        self.pos = nn.Embedding(BLOCK, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)

    data = CharBlocks(make_text())
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

    model = CharLM(data.vocab_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: loss {running[0] / running[1]:.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "char_lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
