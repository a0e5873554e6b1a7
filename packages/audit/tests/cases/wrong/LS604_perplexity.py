"""Custom loop: tiny GPT-2 with DDP and validation perplexity."""
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

L, V = 24, 40


def sequences(n, seed, shortest):
    g = torch.Generator().manual_seed(seed)
    ids = (torch.randint(1, V, (n, 1), generator=g) + torch.arange(L)) % V
    length = torch.randint(shortest, L + 1, (n, 1), generator=g)
    labels = ids.masked_fill(torch.arange(L) >= length, -100)
    return TensorDataset(ids, labels)


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    losses = []
    for ids, labels in loader:
        losses.append(model(input_ids=ids, labels=labels).loss)
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    mean = mean / dist.get_world_size()
    model.train()
    return math.exp(mean.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=V, n_positions=L, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = DDP(GPT2LMHeadModel(config))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, val = sequences(256, 1, L), sequences(64, 2, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            loss = model(input_ids=ids, labels=labels).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        ppl = perplexity(model.module, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val perplexity {ppl:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
