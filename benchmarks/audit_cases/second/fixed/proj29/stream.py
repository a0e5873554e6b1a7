import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info


class ClickStream(IterableDataset):
    """Reads the log files one after another. The files are divided between the workers of the loader."""

    def __init__(self, files, rows_per_file=64, dim=10):
        self.files = list(files)
        self.rows = rows_per_file
        self.dim = dim

    def read(self, number):
        g = torch.Generator().manual_seed(number)
        x = torch.randn(self.rows, self.dim, generator=g)
        y = (x[:, 0] - x[:, 1] + 0.5 * torch.randn(self.rows, generator=g) > 0).float()
        yield from zip(x, y)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number in self.files[rank * workers + worker :: world * workers]:
            yield from self.read(number)
