import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CharDataset(Dataset):
    """Next character over a synthetic text; some windows are garbage."""

    def __init__(self, n=512, length=16, vocab=20):
        g = torch.Generator().manual_seed(0)
        start = torch.randint(vocab, (n, 1), generator=g)
        self.tokens = (start + 3 * torch.arange(length + 1)) % vocab
        bad = torch.rand(n, generator=g) < 0.04
        self.tokens[bad] = torch.randint(vocab, (int(bad.sum()), length + 1), generator=g)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i, :-1], self.tokens[i, 1:]


class CharRNN(nn.Module):
    def __init__(self, vocab=20, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, t):
        h, _ = self.rnn(self.emb(t))
        return self.out(h)


class SpikeGuard:
    """Says whether the loss is far above its running mean."""

    def __init__(self, factor=1.3, beta=0.9):
        self.factor, self.beta, self.mean = factor, beta, None

    def __call__(self, value):
        if self.mean is not None and value > self.factor * self.mean:
            return True
        self.mean = value if self.mean is None else self.beta * self.mean + (1 - self.beta) * value
        return False


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    data = CharDataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(CharRNN())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = SpikeGuard()
    skipped = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            if guard(loss.item()):
                skipped += 1
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: rank 0 loss {loss.item():.4f}, skipped {skipped} steps so far")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
