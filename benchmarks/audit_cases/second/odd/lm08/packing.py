import torch
from torch.utils.data import Dataset

EOS = 0


class PackedDocuments(Dataset):
    """Documents joined into one stream and cut into blocks; positions restart in each document."""

    def __init__(self, block=32, docs=300, vocab=24, seed=0):
        g = torch.Generator().manual_seed(seed)
        stream, doc_id, pos = [], [], []
        for d in range(docs):
            n = int(torch.randint(5, 60, (1,), generator=g))
            start = int(torch.randint(1, vocab, (1,), generator=g))
            tokens = [1 + (start + 2 * i) % (vocab - 1) for i in range(n)] + [EOS]
            stream += tokens
            doc_id += [d] * (n + 1)
            pos += list(range(n + 1))
        usable = (len(stream) - 1) // block * block
        self.tokens = torch.tensor(stream[:usable]).view(-1, block)
        self.targets = torch.tensor(stream[1 : usable + 1]).view(-1, block)
        self.docs = torch.tensor(doc_id[:usable]).view(-1, block)
        self.pos = torch.tensor(pos[:usable]).view(-1, block)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.targets[i], self.docs[i], self.pos[i]


def block_mask(docs):
    """True where attention is allowed: the same document and not the future."""
    same = docs.unsqueeze(2) == docs.unsqueeze(1)
    return same & torch.tril(torch.ones(docs.shape[1], docs.shape[1], dtype=torch.bool))
