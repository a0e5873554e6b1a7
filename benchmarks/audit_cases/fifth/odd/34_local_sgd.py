"""Local SGD: each rank trains its own copy of the model and the copies are averaged every few steps."""
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

VOCAB, LENGTH = 24, 16
EVERY = 4


def phrases(size, seed):
    g = torch.Generator().manual_seed(seed)
    motif = torch.randint(0, VOCAB, (size, 4), generator=g)
    return TensorDataset(motif.repeat(1, LENGTH // 4))


@torch.no_grad()
def average(model):
    world = dist.get_world_size()
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / world, model.parameters())


@torch.no_grad()
def validate(model, data):
    """Every rank sums the loss of its slice; sums and counts are added up."""
    model.eval()
    ids = data.tensors[0][dist.get_rank() :: dist.get_world_size()]
    totals = torch.zeros(2, dtype=torch.float64)
    for chunk in ids.split(16):
        loss = model(input_ids=chunk, labels=chunk).loss
        totals += torch.tensor([loss.item() * len(chunk), len(chunk)], dtype=torch.float64)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    torch.manual_seed(50 + rank)

    train, valid = phrases(512, seed=0), phrases(101, seed=1)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
    epochs, step = 3, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, epochs * len(loader))

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in loader:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVERY == 0:
                average(model)
        average(model)
        loss = validate(model, valid)
        if rank == 0:
            print(f"epoch {epoch}  validation loss {loss:.4f}")

    if rank == 0:
        torch.save(model.state_dict(), "local_sgd.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
