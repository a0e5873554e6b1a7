"""One encoder for all languages (DDP), one private decoder per rank: rank 0 learns 'nordic', rank 1 'romance'."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LANGUAGES = ["nordic", "romance"]
VOCAB, LENGTH, CLASSES = 50, 12, 5
ROWS, BATCH, EPOCHS = 512, 32, 5


def sentences(language, n, seed):
    """The topic words are common to all languages; how topics map to labels is each language's own."""
    g = torch.Generator().manual_seed(1000 * language + seed)
    topic = torch.randint(0, CLASSES, (n,), generator=g)
    common = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    marker = topic[:, None] * 10 + torch.randint(0, 10, (n, LENGTH), generator=g)
    words = torch.where(torch.rand(n, LENGTH, generator=g) < 0.5, marker, common)
    relabel = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(90 + language))
    return words, relabel[topic]


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, words):
        return torch.tanh(self.mix(self.emb(words).mean(1)))


class Decoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.hidden = nn.Linear(dim, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, h):
        return self.out(F.relu(self.hidden(h)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    name = LANGUAGES[rank]
    torch.manual_seed(31)
    encoder = DDP(Encoder())
    # private: this rank alone has the data of its language, so nothing of the decoder is shared
    torch.manual_seed(200 + rank)
    decoder = Decoder()

    shared_opt = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    private_opt = torch.optim.Adam(decoder.parameters(), lr=3e-3)

    # the same number of rows for every language, so the ranks make equally many steps
    words, labels = sentences(rank, ROWS, seed=1)
    test_words, test_labels = sentences(rank, 200, seed=2)
    shuffle = torch.Generator().manual_seed(70 + rank)

    for epoch in range(EPOCHS):
        perm = torch.randperm(ROWS, generator=shuffle)
        encoder.train()
        decoder.train()
        total = 0.0
        for ids in perm.split(BATCH):
            loss = F.cross_entropy(decoder(encoder(words[ids])), labels[ids])
            shared_opt.zero_grad()
            private_opt.zero_grad()
            loss.backward()
            # clipped apart: the encoder's gradient is the mean of the languages, the decoder's is local
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            shared_opt.step()
            private_opt.step()
            total += loss.item()

        encoder.eval()
        decoder.eval()
        with torch.no_grad():
            hits = decoder(encoder.module(test_words)).argmax(1) == test_labels
        mine = torch.tensor([total / (ROWS // BATCH), hits.float().mean().item()])
        table = [torch.zeros(2) for _ in range(world)]
        dist.all_gather(table, mine)
        if rank == 0:
            cells = [f"{lang}: loss {t[0]:.3f} acc {t[1]:.3f}" for lang, t in zip(LANGUAGES, table)]
            print(f"epoch {epoch}  " + "   ".join(cells))

    torch.save(decoder.state_dict(), f"decoder_{name}.pt")
    if rank == 0:
        torch.save(encoder.module.state_dict(), "encoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
