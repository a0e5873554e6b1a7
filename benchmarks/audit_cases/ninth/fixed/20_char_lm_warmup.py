"""Character language model with linear warmup and linear decay of the learning rate."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

ALPHABET = "abcdefghijklmnopqrstuvwxyz ."
CONTEXT = 32


def synthetic_text(n_words=6000, seed=4):
    g = torch.Generator().manual_seed(seed)
    stems = ["model", "train", "layer", "batch", "noise", "graph", "token", "learn"]
    ends = ["", "s", "ing", "ed", "er."]
    words = []
    for _ in range(n_words):
        i = int(torch.randint(0, len(stems), (1,), generator=g))
        j = int(torch.randint(0, len(ends), (1,), generator=g))
        words.append(stems[i] + ends[j])
    return " ".join(words)


class CharWindows(Dataset):
    def __init__(self, text):
        self.codes = torch.tensor([ALPHABET.index(c) for c in text])

    def __len__(self):
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, i):
        chunk = self.codes[i * CONTEXT:i * CONTEXT + CONTEXT + 1]
        return chunk[:-1], chunk[1:]


class CharLM(L.LightningModule):
    def __init__(self, dim=48, lr=4e-3, warmup_fraction=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(ALPHABET), dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(ALPHABET))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.out(h)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        warmup = max(1, int(self.hparams.warmup_fraction * total))

        def schedule(step):
            if step < warmup:
                return (step + 1) / warmup
            return max(0.0, (total - step) / (total - warmup))

        sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
        return [opt], [{"scheduler": sched, "interval": "step"}]


def main():
    L.seed_everything(5)
    epochs = 3
    train = DataLoader(CharWindows(synthetic_text()), batch_size=16, shuffle=True, drop_last=True)
    model = CharLM()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(model, train)
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    trainer.print(f"steps {trainer.global_step}  lr {lr:.2e}  loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
