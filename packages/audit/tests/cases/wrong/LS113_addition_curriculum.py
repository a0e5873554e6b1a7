"""Sequence model for digit sums, trained with an easy-to-hard curriculum (short strings first)."""
import pytorch_lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PAD = 10


class DigitSums(Dataset):
    """Strings of digits; the target is the sum of the digits modulo 5."""

    def __init__(self, n, seed, max_len=20):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, max_len + 1, (n,), generator=g).tolist()
        self.items = [torch.randint(0, 10, (k,), generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        seq = self.items[i]
        return seq, int(seq.sum() % 5)


class CurriculumSampler(Sampler):
    """Visits samples in order of increasing length."""

    def __init__(self, lengths):
        self.order = sorted(range(len(lengths)), key=lambda i: lengths[i])

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def collate(items):
    seqs, targets = zip(*items)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True, padding_value=PAD), lengths, torch.tensor(targets)


class SumNet(L.LightningModule):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(11, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 5)

    def forward(self, seq, lengths):
        out, _ = self.rnn(self.emb(seq))
        last = out[torch.arange(len(seq)), lengths - 1]
        return self.head(last)

    def training_step(self, batch, batch_idx):
        seq, lengths, y = batch
        loss = nn.functional.cross_entropy(self(seq, lengths), y)
        if batch_idx % 10 == 0:
            self.print(f"epoch {self.current_epoch} step {batch_idx:3d} "
                       f"mean length {lengths.float().mean():.1f} loss {loss:.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(1, verbose=False)
    data = DigitSums(1280, seed=0)
    loader = DataLoader(data, batch_size=16, sampler=CurriculumSampler(data.lengths), collate_fn=collate)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(SumNet(), loader)


if __name__ == "__main__":
    main()
