"""Surface-defect detection on small grey images; defects are rare, so training draws a balanced mix."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

SIZE = 16


class Surfaces(Dataset):
    def __init__(self, n, seed, defect_share=0.08):
        rng = np.random.default_rng(seed)
        self.labels = (rng.random(n) < defect_share).astype(int)
        images = rng.normal(0.5, 0.15, size=(n, 1, SIZE, SIZE))
        for image, label in zip(images, self.labels):
            if label:
                r, c = rng.integers(0, SIZE - 5, size=2)
                for step in range(5):
                    image[0, r + step, c + step] += 0.8
        self.images = torch.tensor(images, dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": int(self.labels[i])}


class BalancedTrainer(Trainer):
    """Draws both classes equally often during training."""

    def get_train_dataloader(self):
        labels = np.asarray(self.train_dataset.labels)
        counts = np.bincount(labels, minlength=2)
        weights = 1.0 / counts[labels]
        generator = torch.Generator().manual_seed(self.args.seed)
        sampler = WeightedRandomSampler(
            torch.as_tensor(weights), num_samples=len(labels), replacement=True, generator=generator
        )
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            drop_last=True,
        )
        return self.accelerator.prepare(loader)


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    truth = pred.label_ids
    hits = float(((guess == 1) & (truth == 1)).sum())
    recall = hits / max(1, int((truth == 1).sum()))
    precision = hits / max(1, int((guess == 1).sum()))
    return {"recall": recall, "precision": precision}


def main():
    config = ViTConfig(
        image_size=SIZE, patch_size=4, num_channels=1, hidden_size=48, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=96, num_labels=2,
    )
    args = TrainingArguments(
        output_dir="out_defects",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=5,
    )
    trainer = BalancedTrainer(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=Surfaces(640, seed=0),
        eval_dataset=Surfaces(320, seed=1),
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
