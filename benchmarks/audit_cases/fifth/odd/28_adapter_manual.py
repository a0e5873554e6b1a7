import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed

VOCAB, LENGTH = 40, 12


class LoRA(nn.Module):
    """Replaces the forward of a frozen linear layer; never part of the base model."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        base = linear.forward
        linear.forward = lambda x: base(x) + self.up(self.down(x))


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (n, LENGTH), generator=g)
    labels = (ids[:, : LENGTH // 2].sum(1) > ids[:, LENGTH // 2:].sum(1)).long()
    return TensorDataset(ids, labels)


def average_gradients(accelerator, params):
    flat = torch.cat([p.grad.flatten() for p in params])
    flat = accelerator.reduce(flat, reduction="mean")
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(g.view_as(p))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(30)
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    base = BertForSequenceClassification(config).requires_grad_(False)
    adapters = nn.ModuleList(LoRA(m) for n, m in base.named_modules() if n.endswith(("query", "value", "dense")))
    params = list(adapters.parameters()) + list(base.classifier.requires_grad_(True).parameters())
    with torch.no_grad():
        for p in list(base.parameters()) + list(adapters.parameters()):
            p.copy_(broadcast(p.detach().clone(), from_process=0))

    optimizer = torch.optim.AdamW(params, lr=5e-3)
    train_loader = DataLoader(dataset(1024, 0), batch_size=16, shuffle=True, drop_last=True)
    test_loader = DataLoader(dataset(205, 1), batch_size=64)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    for epoch in range(3):
        base.train()
        for ids, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(base(input_ids=ids).logits, labels)
            loss.backward()
            average_gradients(accelerator, params)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        base.eval()
        hit = n = 0
        with torch.no_grad():
            for ids, labels in test_loader:
                pred, ref = accelerator.gather_for_metrics((base(input_ids=ids).logits.argmax(1), labels))
                hit += (pred == ref).sum().item()
                n += len(ref)
        accelerator.print(f"epoch {epoch} accuracy {hit / n:.3f} ({n})")

    accelerator.save(adapters.state_dict(), "adapters.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
