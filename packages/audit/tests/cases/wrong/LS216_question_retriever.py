"""Question/passage retriever trained with in-batch negatives from every process."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

VOCAB, TOPICS = 300, 64


class Pairs(Dataset):
    def __init__(self, n, seed):
        shared = torch.Generator().manual_seed(99)
        lexicon = torch.randint(0, VOCAB, (TOPICS, 12), generator=shared)
        g = torch.Generator().manual_seed(seed)
        topic = torch.randint(0, TOPICS, (n,), generator=g)
        self.question = lexicon[topic].gather(1, torch.randint(0, 12, (n, 6), generator=g))
        self.passage = lexicon[topic].gather(1, torch.randint(0, 12, (n, 10), generator=g))

    def __len__(self):
        return len(self.question)

    def __getitem__(self, i):
        return self.question[i], self.passage[i]


class BiEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def encode(self, tokens):
        return F.normalize(self.mlp(self.emb(tokens).mean(1)), dim=-1)

    def forward(self, question, passage):
        return self.encode(question), self.encode(passage)


def retrieval_loss(accelerator, q, p, temperature=0.1):
    passages = accelerator.gather(p)
    logits = q @ passages.t() / temperature
    first = accelerator.process_index * len(q)
    targets = torch.arange(first, first + len(q), device=q.device)
    return F.cross_entropy(logits, targets)


def recall_at_1(accelerator, model, loader):
    model.eval()
    qs, ps = [], []
    with torch.no_grad():
        for question, passage in loader:
            q, p = accelerator.gather_for_metrics(model(question, passage))
            qs.append(q)
            ps.append(p)
    q, p = torch.cat(qs), torch.cat(ps)
    return ((q @ p.t()).argmax(1) == torch.arange(len(q))).float().mean().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(31)
    train = DataLoader(Pairs(1024, 1), batch_size=32, shuffle=True, drop_last=True)
    test = DataLoader(Pairs(64, 2), batch_size=32)
    model = BiEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(3):
        model.train()
        running = torch.zeros(())
        for question, passage in train:
            q, p = model(question, passage)
            loss = retrieval_loss(accelerator, q, p)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            running += loss.detach()
        running = accelerator.reduce(running / len(train), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {running:.3f}, recall@1 {recall_at_1(accelerator, model, test):.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "retriever.pt")


if __name__ == "__main__":
    main()
