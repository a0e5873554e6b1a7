"""Small ViT on synthetic textures; the loader is built by hand for full control over workers."""
import math

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed


class Textures(Dataset):
    """Stripes in four orientations with noise."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (size,), generator=g)
        angle = self.labels * math.pi / 4
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        wave = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
        phase = torch.rand(size, 1, 1, generator=g) * 6.28
        image = torch.sin(wave * 0.9 + phase) + 0.5 * torch.randn(size, 16, 16, generator=g)
        self.images = image[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


class VisionTrainer(Trainer):
    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            drop_last=True,
        )
        return self.accelerator.prepare(loader)


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    set_seed(11)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=64, num_labels=4,
        )
    )
    args = TrainingArguments(
        output_dir="vit",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        warmup_steps=2,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = VisionTrainer(
        model=model,
        args=args,
        train_dataset=Textures(512, seed=1),
        eval_dataset=Textures(128, seed=2),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"steps {trainer.state.global_step}  accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
