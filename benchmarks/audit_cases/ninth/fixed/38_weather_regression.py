"""Temperature forecast from station readings with a small transformer regressor."""
import math

import torch
import torch.nn as nn
from torch.utils.data import TensorDataset
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers import get_cosine_schedule_with_warmup

STEPS, FEATURES = 24, 4


def make_series(n, seed):
    g = torch.Generator().manual_seed(seed)
    phase = torch.rand(n, 1, generator=g) * 2 * math.pi
    hours = torch.arange(STEPS + 1).float()
    temp = 12 + 6 * torch.sin(hours / 24 * 2 * math.pi + phase) + torch.randn(n, STEPS + 1, generator=g) * 0.5
    extra = torch.randn(n, STEPS, FEATURES - 1, generator=g)
    extra[..., 0] += temp[:, :-1] * 0.1
    readings = torch.cat([(temp[:, :-1, None] - 12) / 6, extra], dim=-1)
    return TensorDataset(readings, (temp[:, -1] - 12) / 6)


def collate(rows):
    readings, target = zip(*rows)
    return {"readings": torch.stack(readings), "labels": torch.stack(target)}


class ForecastConfig(PreTrainedConfig):
    model_type = "station_forecast"

    def __init__(self, width=32, layers=2, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.layers = layers


class Forecaster(PreTrainedModel):
    config_class = ForecastConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Linear(FEATURES, config.width)
        self.position = nn.Parameter(torch.zeros(1, STEPS, config.width))
        layer = nn.TransformerEncoderLayer(config.width, 4, config.width * 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, config.layers)
        self.head = nn.Linear(config.width, 1)
        self.post_init()

    def forward(self, readings, labels=None):
        hidden = self.encoder(self.embed(readings) + self.position)
        value = self.head(hidden[:, -1]).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(value, labels)
        return {"loss": loss, "logits": value}


def main():
    train_set, valid_set = make_series(768, 0), make_series(192, 1)
    args = TrainingArguments(
        output_dir="out_weather",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=8,
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    model = Forecaster(ForecastConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps_per_epoch = math.ceil(len(train_set) / (args.per_device_train_batch_size * args.world_size))
    total_steps = int(steps_per_epoch * args.num_train_epochs)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=int(0.1 * total_steps), num_training_steps=total_steps
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=valid_set,
        data_collator=collate,
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"rmse {6 * math.sqrt(metrics['eval_loss']):.3f} degrees")


if __name__ == "__main__":
    main()
