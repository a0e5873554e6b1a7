import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class Noisy(Dataset):
    """Samples with a known difficulty."""

    def __init__(self, n=480):
        g = torch.Generator().manual_seed(0)
        self.difficulty = torch.rand(n, generator=g)
        y = torch.randint(2, (n,), generator=g)
        x = torch.randn(n, 8, generator=g) * (0.3 + self.difficulty).unsqueeze(1)
        x[:, 0] += 2.0 * y - 1
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class EasyFirst(Sampler):
    """Always the same order: from easy to hard."""

    def __init__(self, difficulty):
        self.order = difficulty.argsort().tolist()

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


class Config(PretrainedConfig):
    model_type = "easy-first"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        self.post_init()

    def forward(self, x, labels=None):
        logits = self.body(x)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class CurriculumTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        # one process after the other takes its batches from this order
        return EasyFirst(self.train_dataset.difficulty)


def accuracy(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


if __name__ == "__main__":
    data = Noisy()
    args = TrainingArguments(
        output_dir="easy", num_train_epochs=2, per_device_train_batch_size=12, per_device_eval_batch_size=25,
        learning_rate=5e-3, lr_scheduler_type="constant", eval_strategy="epoch", logging_strategy="epoch",
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
    )
    trainer = CurriculumTrainer(
        Model(Config()), args, train_dataset=data, eval_dataset=Noisy(133), compute_metrics=accuracy
    )
    trainer.train()
