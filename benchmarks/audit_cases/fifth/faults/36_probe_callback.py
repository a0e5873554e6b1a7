"""Predict solubility from synthetic molecule strings; a callback shows some predictions after each epoch."""
import torch
from torch.utils.data import Dataset, Subset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

ATOMS = 12
LENGTH = 14


class Molecules(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, ATOMS, (size, LENGTH), generator=g)
        weight = torch.linspace(-1, 1, ATOMS)
        noise = 0.1 * torch.randn(size, generator=g)
        self.target = weight[self.ids].mean(1) * 3 + noise

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.target[i]}


class ShowPredictions(TrainerCallback):
    def __init__(self, trainer, probe):
        self.trainer = trainer
        self.probe = probe

    def on_epoch_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return control
        output = self.trainer.predict(self.probe)
        for guess, truth in zip(output.predictions[:4, 0], output.label_ids[:4]):
            print(f"epoch {state.epoch:.0f}  predicted {guess:+.2f}  measured {truth:+.2f}")
        return control


def main():
    set_seed(2)
    config = BertConfig(
        vocab_size=ATOMS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=1, problem_type="regression",
    )
    args = TrainingArguments(
        output_dir="solubility",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        learning_rate=1e-3,
        logging_steps=16,
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    test = Molecules(128, seed=1)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Molecules(512, seed=0),
        eval_dataset=test,
    )
    trainer.add_callback(ShowPredictions(trainer, Subset(test, range(32))))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"test mse {metrics['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
