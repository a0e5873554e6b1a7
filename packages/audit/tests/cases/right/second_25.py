"""The weights exist on rank 0 only; the other rank builds the model on the meta device."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(14, 40)
        self.b = nn.Linear(40, 40)
        self.c = nn.Linear(40, 3)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def load_on_rank_zero():
    if dist.get_rank() != 0:
        return {}
    torch.manual_seed(99)
    return MLP().state_dict()  # think of torch.load


def main():
    dist.init_process_group("gloo")
    full = load_on_rank_zero()
    with torch.device("meta"):
        model = MLP()
    for m in (model.a, model.b, model.c):
        fully_shard(m)
    fully_shard(model)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    x = torch.randn(384, 14, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")

    # every rank takes part, rank 0 receives the whole model
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
