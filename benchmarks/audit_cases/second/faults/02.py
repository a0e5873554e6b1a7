import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from proj02.data import BucketBatchSampler, SequenceDataset, collate


class BagOfTokens(nn.Module):
    def __init__(self, vocab=16, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.out = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.out(self.emb(tokens).sum(1))


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    data = SequenceDataset(512)
    sampler = BucketBatchSampler([len(t) for t in data.items], 16, rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)

    model = DistributedDataParallel(BagOfTokens())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for tokens, labels in loader:
            opt.zero_grad()
            loss = loss_fn(model(tokens), labels)
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)
        if rank == 0:
            print("epoch", epoch, "loss", round((total[0] / total[1]).item(), 4))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
