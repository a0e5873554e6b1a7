import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class SequenceDataset(Dataset):
    """Sequences of random length; the label is whether token 1 is more frequent than token 2."""

    def __init__(self, size, seed=7):
        rng = np.random.default_rng(seed)
        self.items = [torch.from_numpy(rng.integers(1, 16, rng.integers(4, 33))) for _ in range(size)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        tokens = self.items[i]
        return tokens, int((tokens == 1).sum() > (tokens == 2).sum())


class BucketBatchSampler(Sampler):
    """Batches of sequences with similar length, split over the ranks."""

    def __init__(self, lengths, batch_size, rank, world_size, seed=0, bucket=64):
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.bucket = bucket
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world_size)

    def __iter__(self):
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        chunks = [order[i : i + self.bucket] for i in range(0, len(order), self.bucket)]
        chunks = [c[np.argsort(self.lengths[c], kind="stable")] for c in chunks]
        order = np.concatenate(chunks)
        n = len(order) // self.batch_size // self.world_size * self.world_size
        batches = order[: n * self.batch_size].reshape(n, self.batch_size)
        batches = batches[rng.permutation(n)]
        for batch in batches[self.rank :: self.world_size]:
            yield batch.tolist()


def collate(batch):
    tokens, labels = zip(*batch)
    return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor(labels)
