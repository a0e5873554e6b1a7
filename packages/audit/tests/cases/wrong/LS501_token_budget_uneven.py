import datetime

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence


def corpus(n=96):
    """Tagging data of different lengths; the file is sorted by source, short messages and long articles."""
    g = torch.Generator().manual_seed(2)
    lengths = torch.cat([torch.randint(3, 8, (n // 2,), generator=g), torch.randint(10, 20, (n // 2,), generator=g)])
    return [torch.randint(1, 20, (int(k),), generator=g) for k in lengths]


class TokenBudgetBatches:
    def __init__(self, samples, max_tokens, seed=0):
        self.samples, self.max_tokens, self.seed = samples, max_tokens, seed

    def batches(self, epoch):
        g = torch.Generator().manual_seed(self.seed + epoch)
        batch, longest, out = [], 0, []
        for i in torch.randperm(len(self.samples), generator=g).tolist():
            longest = max(longest, len(self.samples[i]))
            if batch and longest * (len(batch) + 1) > self.max_tokens:
                out.append(batch)
                batch, longest = [], len(self.samples[i])
            batch.append(i)
        out.append(batch)
        return out

    def iterate(self, epoch):
        for batch in self.batches(epoch):
            yield pad_sequence([self.samples[i] for i in batch], batch_first=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 16, padding_idx=0)
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(self.emb(ids))


def main():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=20))])
    set_seed(5)
    samples = corpus()
    per_rank = len(samples) // accelerator.num_processes
    begin = accelerator.process_index * per_rank
    batches = TokenBudgetBatches(samples[begin : begin + per_rank], max_tokens=96)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(2):
        steps = 0
        for ids in batches.iterate(epoch):
            logits = model(ids)
            tokens = (ids > 0).sum()
            total = accelerator.reduce(tokens.clone(), "sum")
            loss = nn.functional.cross_entropy(logits[ids > 0], (ids[ids > 0] % 2), reduction="sum")
            accelerator.backward(loss * accelerator.num_processes / total)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        print(f"[{accelerator.process_index}] epoch {epoch}: {steps} steps", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
