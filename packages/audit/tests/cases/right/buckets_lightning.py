import pytorch_lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Sequences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 30, (n,), generator=g)
        self.items = [torch.randint(1, 20, (int(k),), generator=g) for k in lengths]
        self.lengths = lengths.tolist()

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        seq = self.items[i]
        return seq, float((seq > 15).sum())


class TokenBudgetBatches:
    """Batches of similar length under a token budget; every rank gets the same number of them."""

    def __init__(self, lengths, budget, rank, world, seed=0):
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        batches, current = [], []
        for i in order:
            if current and lengths[i] * (len(current) + 1) > budget:
                batches.append(current)
                current = []
            current.append(i)
        self.batches = batches + [current]
        self.usable = len(self.batches) // world * world

    def __len__(self):
        return self.usable // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        order = torch.randperm(len(self.batches), generator=g)[: self.usable]
        for j in order[self.rank:: self.world].tolist():
            yield self.batches[j]


def collate(items):
    seqs, counts = zip(*items)
    return pad_sequence(seqs, batch_first=True), torch.tensor(counts)


class Counter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)

    def training_step(self, batch, i):
        x, y = batch
        total = nn.functional.smooth_l1_loss(self.out(self.emb(x)).squeeze(-1).mul(x > 0).sum(1), y, reduction="sum")
        self.log("loss", total.detach() / len(y), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        # batches differ in size between the ranks: every sample of the step gets the same weight
        return total / self.all_gather(torch.tensor(float(len(y)))).mean()

    def train_dataloader(self):
        ds = Sequences(240, 0)
        sampler = TokenBudgetBatches(ds.lengths, 120, self.global_rank, self.trainer.world_size)
        return DataLoader(ds, batch_sampler=sampler, collate_fn=collate)

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} steps {self.global_step} loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(6)
    L.Trainer(max_epochs=2, devices=2, accelerator="cpu", strategy="ddp", use_distributed_sampler=False, logger=False,
              enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(Counter())
