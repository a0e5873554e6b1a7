import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class Sentences(Dataset):
    def __init__(self, n=384, vocab=30):
        g = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(3, 20, (n,), generator=g).tolist()
        self.tokens = [torch.randint(1, vocab, (k,), generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        t = self.tokens[i]
        return t, (t.float().mean() > 15).long()


class SortedBatches(Sampler):
    """Takes windows of the shuffled indices, sorts each by length, and cuts it into batches."""

    def __init__(self, source, lengths, batch_size, window=4):
        self.sampler = source
        self.lengths = lengths
        self.batch_size = batch_size
        self.window = window * batch_size

    def __len__(self):
        return len(self.sampler) // self.batch_size

    def __iter__(self):
        order = list(self.sampler)
        for i in range(0, len(order), self.window):
            part = sorted(order[i : i + self.window], key=self.lengths.__getitem__)
            for j in range(0, len(part) - self.batch_size + 1, self.batch_size):
                yield part[j : j + self.batch_size]


def collate(items):
    t, y = zip(*items)
    return nn.utils.rnn.pad_sequence(t, batch_first=True), torch.stack(y)


class SentenceData(L.LightningDataModule):
    def train_dataloader(self):
        data = Sentences()
        source = DistributedSampler(
            data, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=True
        )
        return DataLoader(data, batch_sampler=SortedBatches(source, data.lengths, 16), collate_fn=collate)


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(30, 32, padding_idx=0)
        self.out = nn.Linear(32, 2)

    def training_step(self, batch, _):
        tokens, y = batch
        loss = F.cross_entropy(self.out(self.emb(tokens)), y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(y))
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Tagger(), SentenceData())
