"""Sequence tagger on sentences of very different length; own gradient averaging, no wrapper."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

VOCAB, TAGS, PAD = 60, 7, -100
EPOCHS, BATCH = 3, 8


def make_sentences(n=384):
    g = torch.Generator().manual_seed(31)
    sentences = []
    for _ in range(n):
        long = torch.rand(1, generator=g).item() < 0.2
        length = int(torch.randint(40, 80, (1,), generator=g) if long else torch.randint(3, 10, (1,), generator=g))
        words = torch.randint(1, VOCAB, (length,), generator=g)
        prev = torch.cat([torch.zeros(1, dtype=torch.long), words[:-1]])
        tags = (words + 2 * prev) % TAGS
        sentences.append((words, tags))
    return sentences


def collate(items):
    words = pad_sequence([w for w, _ in items], batch_first=True, padding_value=0)
    tags = pad_sequence([t for _, t in items], batch_first=True, padding_value=PAD)
    return words, tags


def epoch_batches(n, epoch, rank, world):
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(500 + epoch)).tolist()
    step = BATCH * world
    for i in range(0, n - step + 1, step):
        chunk = perm[i : i + step]
        yield chunk[rank * BATCH : (rank + 1) * BATCH]


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, 2 * dim, 3, padding=1)
        self.mix = nn.Linear(2 * dim, 2 * dim)
        self.out = nn.Linear(2 * dim, TAGS)

    def forward(self, words):
        h = F.relu(self.conv(self.emb(words).transpose(1, 2)).transpose(1, 2))
        return self.out(F.relu(self.mix(h)))


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Tagger()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    sentences = make_sentences()

    for epoch in range(EPOCHS):
        stats = torch.zeros(3)
        for ids in epoch_batches(len(sentences), epoch, rank, world):
            words, tags = collate([sentences[i] for i in ids])
            logits = model(words)
            mask = tags != PAD
            loss_sum = F.cross_entropy(logits[mask], tags[mask], reduction="sum")
            n = mask.sum().item()
            n_global = torch.tensor(float(n))
            dist.all_reduce(n_global)
            # average_gradients divides by the world size
            loss = loss_sum * world / n_global
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()

            hits = (logits.argmax(-1)[mask] == tags[mask]).sum().item()
            stats += torch.tensor([loss_sum.item(), hits, n])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss/token {stats[0] / stats[2]:.4f} accuracy {stats[1] / stats[2]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
