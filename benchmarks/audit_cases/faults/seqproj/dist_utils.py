import torch
import torch.distributed as dist


def setup(seed):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)


def cleanup():
    dist.destroy_process_group()


def print0(*a):
    if dist.get_rank() == 0:
        print(*a, flush=True)
