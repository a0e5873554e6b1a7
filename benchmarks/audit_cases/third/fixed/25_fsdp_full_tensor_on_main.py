import argparse
import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def log(*args):
    if dist.get_rank() == 0:
        print(*args, flush=True)


def save_checkpoint(model, path):
    state = {}
    for name, param in model.state_dict().items():
        state[name] = param.full_tensor().cpu()
    if dist.get_rank() == 0:
        torch.save(state, path)
    log("saved", path)


class CharModel(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, 32, batch_first=True)
        self.out = nn.Linear(32, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    torch.manual_seed(0)
    tokens = (torch.arange(9) * (1 + torch.arange(64) // 32)[:, None] + torch.arange(64)[:, None]) % 32
    ds = TensorDataset(tokens)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    model = CharModel()
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (t,) in loader:
            logits = model(t[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        log(f"epoch {epoch} done")
        save_checkpoint(model, f"char-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
