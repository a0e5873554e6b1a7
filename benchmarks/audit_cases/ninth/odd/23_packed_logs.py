"""Next-event model on packed server logs; the loss is normalised by the tokens of the whole global batch."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

EVENTS, LENGTH = 40, 48


def packed_logs(rows, seed):
    """Rows of several sessions, one behind the other, and some empty room at the end (session -1)."""
    jump = torch.randint(1, 6, (EVENTS,), generator=torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    session = torch.full((rows, LENGTH), -1)
    for row in range(rows):
        start, number = 0, 0
        while True:
            size = int(torch.randint(5, 25, (1,), generator=gen))
            if start + size > LENGTH:
                break
            event = int(torch.randint(0, EVENTS, (1,), generator=gen))
            for pos in range(start, start + size):
                tokens[row, pos], session[row, pos] = event, number
                event = (event + int(jump[event]) + int(torch.rand(1, generator=gen) < 0.1)) % EVENTS
            start, number = start + size, number + 1
    return TensorDataset(tokens, session)


class EventModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, EVENTS))

    def forward(self, tokens, session):
        h = self.embed(tokens)
        same = session[:, :, None] == session[:, None, :]
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        h = h + self.mix(F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal))
        return self.out(h)


def summed_loss(model, tokens, session):
    logits = model(tokens, session)[:, :-1]
    valid = (session[:, 1:] == session[:, :-1]) & (session[:, 1:] >= 0)
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return (loss * valid).sum(dim=1), valid.sum(dim=1)


def main(epochs=3, batch_size=8):
    set_seed(2)
    accelerator = Accelerator(cpu=True)
    train = DataLoader(packed_logs(480, 1), batch_size=batch_size, shuffle=True)
    test = DataLoader(packed_logs(90, 2), batch_size=batch_size)
    model = EventModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(epochs):
        model.train()
        seen, total = 0.0, 0.0
        for tokens, session in train:
            sums, counts = summed_loss(model, tokens, session)
            # tokens of both ranks; times num_processes, because the gradients are averaged afterwards
            everywhere = accelerator.reduce(counts.sum(), reduction="sum")
            loss = sums.sum() * accelerator.num_processes / everywhere
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.reduce(sums.sum().detach(), reduction="sum").item()
            seen += everywhere.item()
        model.eval()
        losses, tokens_in = [], []
        with torch.no_grad():
            for tokens, session in test:
                sums, counts = accelerator.gather_for_metrics(summed_loss(model, tokens, session))
                losses.append(sums)
                tokens_in.append(counts)
        ppl = math.exp(torch.cat(losses).sum().item() / torch.cat(tokens_in).sum().item())
        accelerator.print(f"epoch {epoch}: train loss {total / seen:.4f} test perplexity {ppl:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
