"""Land-cover classes of pixels: first only the head on a frozen body, then all in a second Trainer."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

BANDS, CLASSES = 10, 4


class Pixels(Dataset):
    def __init__(self, n, seed):
        centers = torch.randn(CLASSES, BANDS, generator=torch.Generator().manual_seed(77))
        g = torch.Generator().manual_seed(seed)
        self.cover = torch.randint(0, CLASSES, (n,), generator=g)
        self.bands = centers[self.cover] + torch.randn(n, BANDS, generator=g)

    def __len__(self):
        return len(self.cover)

    def __getitem__(self, i):
        return {"bands": self.bands[i], "labels": self.cover[i]}


class CoverNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(BANDS, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, bands, labels=None):
        logits = self.head(self.body(bands))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def make_args(stage, epochs, lr):
    return TrainingArguments(
        output_dir=f"out_cover_{stage}", use_cpu=True, num_train_epochs=epochs, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=lr, eval_strategy="epoch", save_strategy="no",
        logging_steps=8, report_to="none", disable_tqdm=True, seed=30 + stage,
    )


def fit(model, args, train_set, valid_set):
    trainer = Trainer(
        model=model, args=args, train_dataset=train_set, eval_dataset=valid_set, compute_metrics=accuracy
    )
    trainer.train()
    return trainer, trainer.evaluate()["eval_accuracy"]


def main():
    set_seed(30)
    train_set, valid_set = Pixels(512, 0), Pixels(128, 1)

    probe = CoverNet()
    probe.body.requires_grad_(False)  # before the Trainer wraps the model
    _, first = fit(probe, make_args(1, 2, 1e-2), train_set, valid_set)

    # a new module with everything trainable, so that the new wrapper knows all parameters
    full = CoverNet()
    full.load_state_dict(probe.state_dict())
    trainer, second = fit(full, make_args(2, 2, 1e-3), train_set, valid_set)
    if trainer.is_world_process_zero():
        print(f"probe {first:.3f}, tuned {second:.3f}")


if __name__ == "__main__":
    main()
