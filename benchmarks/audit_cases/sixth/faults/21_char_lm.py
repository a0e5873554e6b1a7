"""Small character level language model with a warmup + cosine schedule."""
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = (
    "the quick brown fox jumps over the lazy dog while the old grey cat sleeps by the fire "
    "and the rain keeps falling on the roof of the small house near the river "
) * 40
BLOCK = 32
EPOCHS = 3


class CharDataset(Dataset):
    def __init__(self, text, block):
        self.vocab = sorted(set(text))
        stoi = {c: i for i, c in enumerate(self.vocab)}
        self.ids = torch.tensor([stoi[c] for c in text])
        self.block = block

    def __len__(self):
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = self.ids[s : s + self.block + 1]
        return chunk[:-1], chunk[1:]


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.out(h)


def cosine_with_warmup(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1337)

    data = CharDataset(TEXT, BLOCK)
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = CharGRU(len(data.vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    total_steps = EPOCHS * len(loader)
    scheduler = cosine_with_warmup(optimizer, warmup=total_steps // 10, total=total_steps)
    scheduler = accelerator.prepare(scheduler)

    accelerator.print(f"training for {total_steps} steps")
    step = 0
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                lr = scheduler.get_last_lr()[0]
                accelerator.print(f"step {step:4d} loss {mean.item():.3f} lr {lr:.2e}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "char_gru.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
