"""Deep tabular net whose layers are scaled at the start by activations that the ranks measure together."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

COLUMNS, CLASSES, DEPTH = 16, 3, 6


class Table(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        units = torch.logspace(-1, 1, COLUMNS)
        raw = torch.randn(n, COLUMNS, generator=g)
        self.rows = raw * units + units
        self.target = (raw[:, 0] > 0.4).long() + (raw[:, 1] > 0.0).long()

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return {"rows": self.rows[i], "labels": self.target[i]}


class DeepNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.register_buffer("mean", torch.zeros(COLUMNS))
        self.register_buffer("std", torch.ones(COLUMNS))
        sizes = [COLUMNS] + [width] * DEPTH
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, rows, labels=None):
        hidden = (rows - self.mean) / self.std
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def moments(values):
    """Mean and standard deviation of each column over the parts of all ranks."""
    values = values.double()
    count = torch.full((1,), float(len(values)), dtype=torch.float64)
    stats = torch.cat([values.sum(0), (values**2).sum(0), count])
    if dist.is_initialized():
        dist.all_reduce(stats)
    total, squares = stats[:-1].chunk(2)
    mean = total / stats[-1]
    variance = (squares / stats[-1] - mean**2).clamp_min(1e-12)
    return mean.float(), variance.sqrt().float()


@torch.no_grad()
def measured_init(model, rows):
    """`rows` is another part on each rank; the sums are common, so the weights stay equal."""
    mean, std = moments(rows)
    model.mean.copy_(mean)
    model.std.copy_(std)
    hidden = (rows - model.mean) / model.std
    for layer in model.layers:
        mean, std = moments(layer(hidden))
        layer.weight.div_(std[:, None])
        layer.bias.sub_(mean).div_(std)
        hidden = torch.relu(layer(hidden))


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir="out_table", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=33,
    )
    set_seed(args.seed)
    train_set, valid_set = Table(768, 0), Table(192, 1)
    model = DeepNet()
    measured_init(model, train_set.rows[args.process_index :: args.world_size])

    trainer = Trainer(
        model=model, args=args, train_dataset=train_set, eval_dataset=valid_set, compute_metrics=accuracy
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
