"""Character language model (GRU) on a synthetic dialect; small micro batches to fit into memory."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

CONFIG = dict(epochs=2, micro_batch=8, accumulation=4, lr=3e-3, context=32, hidden=64)
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,"


def write_corpus(length=27400):
    gen = torch.Generator().manual_seed(7)
    table = torch.softmax(torch.randn(len(ALPHABET), len(ALPHABET), generator=gen) * 2.0, dim=-1)
    state, out = 0, []
    for _ in range(length):
        state = torch.multinomial(table[state], 1, generator=gen).item()
        out.append(state)
    return torch.tensor(out)


class Windows(Dataset):
    def __init__(self, tokens, context):
        self.tokens, self.context = tokens, context

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i):
        start = i * self.context
        chunk = self.tokens[start:start + self.context + 1]
        return chunk[:-1], chunk[1:]


class CharGRU(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(ALPHABET))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.head(h)


def lm_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


@torch.no_grad()
def perplexity(accelerator, model, loader):
    model.eval()
    losses = []
    for x, y in loader:
        token_loss = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(dim=1)
        losses.append(accelerator.gather_for_metrics(token_loss))
    return math.exp(torch.cat(losses).mean().item())


def main():
    set_seed(1234)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=CONFIG["accumulation"])
    tokens = write_corpus()
    split = int(len(tokens) * 0.9)
    train = DataLoader(Windows(tokens[:split], CONFIG["context"]), CONFIG["micro_batch"], shuffle=True, drop_last=True)
    valid = DataLoader(Windows(tokens[split:], CONFIG["context"]), 16)
    model = CharGRU(CONFIG["hidden"])
    optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG["lr"])
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)

    for epoch in range(CONFIG["epochs"]):
        model.train()
        total = torch.zeros(())
        for x, y in train:
            with accelerator.accumulate(model):
                loss = lm_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train), reduction="mean").item()
        ppl = perplexity(accelerator, model, valid)
        accelerator.print(f"epoch {epoch}: train loss {train_loss:.3f}, valid ppl {ppl:.2f}")


if __name__ == "__main__":
    main()
