"""Contrastive pre-training of two towers (spectra and captions) with the negatives of all processes."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

TOPICS, CAPTION, SPECTRUM, VOCAB = 24, 8, 40, 200


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(77)
        basis = torch.randn(TOPICS, SPECTRUM, generator=g)
        words = torch.randint(0, VOCAB, (TOPICS, 5), generator=g)
        g = torch.Generator().manual_seed(seed)
        mix = torch.rand(n, TOPICS, generator=g) ** 6
        self.spectra = mix @ basis + 0.1 * torch.randn(n, SPECTRUM, generator=g)
        topic = torch.multinomial(mix, CAPTION, replacement=True, generator=g)
        pick = torch.randint(0, 5, (n, CAPTION), generator=g)
        self.captions = words[topic, pick]

    def __len__(self):
        return len(self.spectra)

    def __getitem__(self, i):
        return {"spectrum": self.spectra[i], "caption": self.captions[i]}


class TwoTowers(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.spectrum = nn.Sequential(nn.Linear(SPECTRUM, 64), nn.GELU(), nn.Linear(64, dim))
        self.embed = nn.EmbeddingBag(VOCAB, 64)
        self.caption = nn.Sequential(nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, spectrum, caption):
        a = F.normalize(self.spectrum(spectrum), dim=-1)
        b = F.normalize(self.caption(self.embed(caption)), dim=-1)
        return a, b, self.logit_scale.exp()


def gather_features(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class ContrastiveTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        a, b, scale = model(**inputs)
        all_a, all_b = gather_features(torch.cat([a, b], dim=1)).chunk(2, dim=1)
        target = torch.arange(len(a)) + len(a) * dist.get_rank()
        loss_a = F.cross_entropy(scale * a @ all_b.T, target)
        loss_b = F.cross_entropy(scale * b @ all_a.T, target)
        loss = (loss_a + loss_b) / 2
        return (loss, (a, b)) if return_outputs else loss


@torch.no_grad()
def recall_at_1(model, data):
    model.eval()
    a, b, _ = model(data.spectra, data.captions)
    return (a @ b.T).argmax(1).eq(torch.arange(len(a))).float().mean().item()


def main():
    set_seed(31)
    args = TrainingArguments(
        output_dir="runs/towers",
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=32,
        dataloader_drop_last=True,
        learning_rate=3e-3,
        weight_decay=0.01,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        seed=31,
    )
    trainer = ContrastiveTrainer(model=TwoTowers(), args=args, train_dataset=Pairs(1024, 1))
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"recall@1 on 128 held-out pairs: {recall_at_1(trainer.model, Pairs(128, 2)):.3f}")


if __name__ == "__main__":
    main()
