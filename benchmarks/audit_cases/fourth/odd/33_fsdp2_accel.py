"""Accelerate for the loaders and metrics, FSDP2 (fully_shard) for the model, which is not prepared."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=16, depth=3):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.out = nn.Linear(d, 2)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def xor_data(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long())


def main():
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    set_seed(20)  # the same initial weights everywhere
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(xor_data(320, 0), batch_size=16, shuffle=True)
    test = DataLoader(xor_data(64, 1), batch_size=16)
    train, test = accelerator.prepare(train, test)
    for epoch in range(2):
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        for x, y in test:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        accelerator.print(f"epoch {epoch} accuracy {torch.cat(hits).float().mean():.4f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        own = sum(p.to_local().numel() for p in model.parameters())
        print("own numbers", own, "of", sum(v.numel() for v in state.values()))
        torch.save(state, "full.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
