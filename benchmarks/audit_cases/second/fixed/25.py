import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, SEQ, DIM = 32, 24, 32


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, t):
        n = t.shape[1]
        mask = torch.triu(torch.full((n, n), float("-inf")), 1)
        h = self.tok(t) + self.pos(torch.arange(n))
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.out(h)


@torch.no_grad()
def clip_gradients(model, max_norm):
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    norm = norm**2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(coef)
    return norm


def corpus(n=256):
    g = torch.Generator().manual_seed(0)
    start = torch.randint(VOCAB, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + step * torch.arange(SEQ + 1)) % VOCAB)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = corpus()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = TinyLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for (t,) in loader:
            logits = model(t[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            clip_gradients(model, 0.5)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
