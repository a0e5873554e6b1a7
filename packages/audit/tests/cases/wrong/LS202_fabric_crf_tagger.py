"""BiLSTM-CRF part-of-speech style tagger trained with Lightning Fabric."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fabric import Fabric

VOCAB, TAGS, LEN = 60, 5, 12


def make_corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(0, VOCAB, (n, LEN), generator=g)
    tags = words % TAGS
    after_zero = torch.roll(tags, 1, dims=1) == 0
    after_zero[:, 0] = False
    tags = torch.where(after_zero, (tags + 1) % TAGS, tags)
    return TensorDataset(words, tags)


class BiLstmCrf(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.proj = nn.Linear(2 * dim, TAGS)
        self.trans = nn.Parameter(torch.zeros(TAGS, TAGS))

    def forward(self, words):
        return self.proj(self.lstm(self.emb(words))[0])

    def neg_log_likelihood(self, words, tags):
        emit = self(words)
        gold = emit.gather(2, tags.unsqueeze(-1)).squeeze(-1).sum(1)
        gold = gold + self.trans[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = emit[:, 0]
        for t in range(1, emit.size(1)):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.trans, dim=1) + emit[:, t]
        return (torch.logsumexp(alpha, dim=1) - gold).mean()

    @torch.no_grad()
    def viterbi(self, words):
        emit = self(words)
        score, back = emit[:, 0], []
        for t in range(1, emit.size(1)):
            best, idx = (score.unsqueeze(2) + self.trans).max(dim=1)
            score = best + emit[:, t]
            back.append(idx)
        path = [score.argmax(1)]
        for idx in reversed(back):
            path.append(idx.gather(1, path[-1].unsqueeze(1)).squeeze(1))
        return torch.stack(path[::-1], dim=1)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(5)

    model = BiLstmCrf()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(make_corpus(512, 1), batch_size=16, shuffle=True))
    valid = fabric.setup_dataloaders(DataLoader(make_corpus(128, 2), batch_size=32))

    for epoch in range(3):
        model.train()
        for words, tags in train:
            optimizer.zero_grad()
            loss = model.module.neg_log_likelihood(words, tags)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()

        model.eval()
        hits = torch.zeros(2)
        for words, tags in valid:
            pred = model.module.viterbi(words)
            hits += torch.tensor([(pred == tags).sum().item(), tags.numel()])
        hits = fabric.all_reduce(hits, reduce_op="sum")
        fabric.print(f"epoch {epoch} token accuracy {(hits[0] / hits[1]).item():.4f}")


if __name__ == "__main__":
    main()
