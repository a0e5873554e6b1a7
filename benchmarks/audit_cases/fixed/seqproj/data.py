import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def copy_task_loader(batch_size, n=384, length=6, vocab=12):
    g = torch.Generator().manual_seed(31)
    src = torch.randint(1, vocab, (n, length), generator=g)
    data = TensorDataset(src, src.flip(1))
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size=batch_size, sampler=sampler), sampler
