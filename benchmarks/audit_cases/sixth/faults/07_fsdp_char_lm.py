"""Character language model, parameters sharded with FSDP2."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BLOCK, DIM, HEADS, LAYERS = 32, 48, 4, 2
STEPS, BATCH, LR, MAX_NORM = 60, 16, 3e-3, 0.25


def build_corpus(n_sentences=1500):
    rng = random.Random(8)
    subj = ["the pilot", "a miner", "our cook", "the old clerk", "her nephew"]
    verb = ["sold", "painted", "lost", "borrowed", "repaired"]
    obj = ["two lamps", "the red boat", "a map", "nine chairs", "the clock"]
    text = " ".join(f"{rng.choice(subj)} {rng.choice(verb)} {rng.choice(obj)}." for _ in range(n_sentences))
    chars = sorted(set(text))
    table = {c: i for i, c in enumerate(chars)}
    return torch.tensor([table[c] for c in text]), len(chars)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(att.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, DIM)
        self.pos = nn.Embedding(BLOCK, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


@torch.no_grad()
def clip_gradients(parameters, max_norm):
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    total_norm = torch.stack([g.norm() for g in grads]).norm()
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(scale)
    return total_norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(31)
    data, vocab = build_corpus()
    model = CharLM(vocab)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * 100, momentum=0.9)

    batches = torch.Generator().manual_seed(1000 + rank)
    for step in range(STEPS):
        starts = torch.randint(0, len(data) - BLOCK - 1, (BATCH,), generator=batches)
        chunk = torch.stack([data[s:s + BLOCK + 1] for s in starts.tolist()])
        logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.3f} grad norm {norm.item():.3f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
