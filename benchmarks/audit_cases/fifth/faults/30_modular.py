import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import Accelerator
from accelerate.utils import set_seed

P = 11
SEQ = 8
STEPS = 150
BATCH = 32


def running_sums(batch_size, generator=None):
    """digits d1..dn followed by their running sums mod P"""
    digits = torch.randint(0, P, (batch_size, SEQ), generator=generator)
    sums = digits.cumsum(1) % P
    return torch.cat([digits, sums], dim=1)


def lm_loss(logits, tokens):
    return F.cross_entropy(logits[:, SEQ - 1:-1].flatten(0, 1), tokens[:, SEQ:].flatten())


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=P, n_positions=2 * SEQ, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )
        self.lm = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.lm(input_ids=tokens).logits


@torch.no_grad()
def exact_digits(accelerator, model, loader):
    model.eval()
    ok = n = 0
    for (tokens,) in loader:
        pred = model(tokens)[:, SEQ - 1:-1].argmax(-1)
        hits = (pred == tokens[:, SEQ:]).float().mean(1)
        hits = accelerator.gather_for_metrics(hits)
        ok += hits.sum().item()
        n += len(hits)
    model.train()
    return ok / n


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1234)

    test_set = TensorDataset(running_sums(300, torch.Generator().manual_seed(77)))
    test_loader = DataLoader(test_set, batch_size=64)

    model = Solver()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    model, optimizer, test_loader = accelerator.prepare(model, optimizer, test_loader)

    for step in range(1, STEPS + 1):
        tokens = running_sums(BATCH).to(accelerator.device)
        loss = lm_loss(model(tokens), tokens)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        if step % 50 == 0:
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            acc = exact_digits(accelerator, model, test_loader)
            seen = step * BATCH * accelerator.num_processes
            accelerator.print(f"step {step} examples {seen} loss {mean:.4f} test digits {acc:.3f}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
