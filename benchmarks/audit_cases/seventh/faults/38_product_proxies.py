"""Product search embeddings: a small encoder trained with a Proxy-Anchor style loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, set_seed

N_PRODUCTS, DIM_IN, DIM_EMB = 24, 64, 16


def make_split(n_per_product, seed):
    centres = torch.randn(N_PRODUCTS, DIM_IN, generator=torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(seed)
    labels = torch.arange(N_PRODUCTS).repeat_interleave(n_per_product)
    feats = centres[labels] + 1.2 * torch.randn(len(labels), DIM_IN, generator=gen)
    return TensorDataset(feats, labels)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM_IN, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, DIM_EMB))

    def forward(self, feats):
        return F.normalize(self.net(feats), dim=-1)


class ProxyLoss(nn.Module):
    """Pulls an embedding to the proxy of its product and pushes it from the others."""

    def __init__(self, n_classes, dim, scale=16.0, margin=0.1):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(n_classes, dim) * 0.1)
        self.scale, self.margin = scale, margin

    def forward(self, emb, labels):
        sim = emb @ F.normalize(self.proxies, dim=-1).t()
        sim = sim - self.margin * F.one_hot(labels, sim.size(1))
        return F.cross_entropy(self.scale * sim, labels)


class MetricTrainer(Trainer):
    def __init__(self, *args, criterion, **kwargs):
        super().__init__(*args, **kwargs)
        self.criterion = criterion.to(self.args.device)

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.model.parameters(), "lr": self.args.learning_rate},
                {"params": self.criterion.parameters(), "lr": 10 * self.args.learning_rate},
            ],
            weight_decay=1e-4,
        )
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        emb = model(inputs["feats"])
        loss = self.criterion(emb, inputs["labels"])
        return (loss, {"emb": emb}) if return_outputs else loss


def collate(batch):
    feats, labels = zip(*batch)
    return {"feats": torch.stack(feats), "labels": torch.stack(labels)}


def recall_at_1(pred):
    emb, labels = torch.tensor(pred.predictions), torch.tensor(pred.label_ids)
    sim = emb @ emb.t()
    sim.fill_diagonal_(-2)
    return {"recall_at_1": (labels[sim.argmax(1)] == labels).float().mean().item()}


if __name__ == "__main__":
    set_seed(7)
    args = TrainingArguments(
        output_dir="product-search", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=5,
        eval_strategy="epoch", logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        remove_unused_columns=False, label_names=["labels"], seed=7,
    )
    trainer = MetricTrainer(
        model=Encoder(), args=args, train_dataset=make_split(24, 1), eval_dataset=make_split(6, 2),
        data_collator=collate, compute_metrics=recall_at_1, criterion=ProxyLoss(N_PRODUCTS, DIM_EMB),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save({"encoder": trainer.model.state_dict(), "proxies": trainer.criterion.state_dict()}, "search.pt")
