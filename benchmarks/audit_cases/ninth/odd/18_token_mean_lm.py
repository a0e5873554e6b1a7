"""Language model on documents of varying length: accumulated gradients, loss averaged over all tokens of all ranks."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.nn.utils.rnn import pad_sequence

VOCAB = 40
IGNORE = -100
MICRO = 8
ACCUMULATE = 3


def make_documents(n, seed):
    """Each token is the last one plus a step that belongs to the document."""
    g = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(n):
        length = int(torch.randint(6, 40, (1,), generator=g))
        start, step = torch.randint(0, VOCAB, (2,), generator=g).tolist()
        noise = (torch.rand(length, generator=g) < 0.1).long()
        documents.append((start + step * torch.arange(length) + noise) % VOCAB)
    return documents


def collate(documents):
    x = pad_sequence([d[:-1] for d in documents], batch_first=True)
    y = pad_sequence([d[1:] for d in documents], batch_first=True, padding_value=IGNORE)
    return x, y


def micro_batches(documents, epoch, rank, world):
    """One shuffled order for all ranks; each rank takes every world-th micro-batch, equally many."""
    g = torch.Generator().manual_seed(15 + epoch)
    order = torch.randperm(len(documents), generator=g).tolist()
    order = order[:len(order) // (MICRO * world) * MICRO * world]
    chunks = [order[i:i + MICRO] for i in range(0, len(order), MICRO)]
    return [collate([documents[i] for i in chunk]) for chunk in chunks[rank::world]]


class TinyLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.out(h)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(15)
    rank, world = fabric.global_rank, fabric.world_size

    documents = make_documents(768, 0)
    model = TinyLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(4):
        own = micro_batches(documents, epoch, rank, world)
        total, seen = torch.zeros(()), torch.zeros(())
        for start in range(0, len(own), ACCUMULATE):
            group = own[start:start + ACCUMULATE]
            tokens = torch.tensor(float(sum(int((y != IGNORE).sum()) for _, y in group)))
            dist.all_reduce(tokens)
            optimizer.zero_grad()
            for k, (x, y) in enumerate(group):
                with fabric.no_backward_sync(model, enabled=k < len(group) - 1):
                    logits = model(x)
                    nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
                    # DDP divides by the number of ranks; the factor takes that back
                    fabric.backward(nll * world / tokens)
                total += nll.detach()
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            seen += tokens
        dist.all_reduce(total)
        fabric.print(f"epoch {epoch} loss per token {(total / seen).item():.4f}")

    if rank == 0:
        torch.save(model.state_dict(), "tiny_lm.pt")
    fabric.barrier()


if __name__ == "__main__":
    main()
