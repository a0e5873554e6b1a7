"""Masked language model with batches by token budget: processes see different numbers of tokens and of batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric

VOCAB, PAD, MASK = 40, 0, 1
BUDGET = 256
EPOCHS = 3


def make_sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = int(torch.randint(5, 40, (1,), generator=g))
        start, stride = torch.randint(0, VOCAB - 2, (1,), generator=g), torch.randint(1, 4, (1,), generator=g)
        out.append((start + stride * torch.arange(length)) % (VOCAB - 2) + 2)
    return out


def batches_by_budget(sentences, order):
    batch, longest = [], 0
    for i in order:
        longest = max(longest, len(sentences[i]))
        if batch and longest * (len(batch) + 1) > BUDGET:
            yield nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)
            batch, longest = [], len(sentences[i])
        batch.append(sentences[i])
    if batch:
        yield nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def summed_loss(model, tokens, generator):
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.2) & (tokens != PAD)
    logits = model(tokens.masked_fill(hidden, MASK))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (loss * hidden.flatten()).sum(), hidden.sum()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(22)
    model = Encoder()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=4e-3))
    sentences = make_sentences(401, 1)
    masks = torch.Generator().manual_seed(70 + fabric.global_rank)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(epoch)).tolist()
        batches = list(batches_by_budget(sentences, order[fabric.global_rank::fabric.world_size]))
        steps = int(fabric.all_gather(torch.tensor(len(batches))).max())
        seen = torch.zeros(2)
        for step in range(steps):
            tokens = batches[step] if step < len(batches) else torch.full((1, 4), PAD)
            total, count = summed_loss(model, tokens, masks)
            everywhere = fabric.all_reduce(count.clone().float(), reduce_op="sum").clamp(min=1)
            optimizer.zero_grad()
            fabric.backward(total * fabric.world_size / everywhere)
            optimizer.step()
            seen += torch.stack([total.detach(), count.float()])
        seen = fabric.all_reduce(seen, reduce_op="sum")
        fabric.print(f"epoch {epoch}: {steps} steps, loss {seen[0] / seen[1]:.4f} over {int(seen[1])} masked tokens")


if __name__ == "__main__":
    main()
