import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForTokenClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Parity(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 30, (n, 8), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i] % 2}


class LogOnMain(TrainerCallback):
    """Rank-dependent on purpose: only the main process writes a log file."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            with open("log.txt", "a") as f:
                f.write(f"{state.global_step} {metrics['eval_loss']:.4f}\n")


def main():
    config = BertConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = BertForTokenClassification(config)
    # the embeddings and the first layer stay as they are
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    args = TrainingArguments(
        output_dir="parity", num_train_epochs=4, per_device_train_batch_size=8, per_device_eval_batch_size=16,
        learning_rate=3e-3, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
    )
    trainer = Trainer(
        model, args, train_dataset=Parity(192, 0), eval_dataset=Parity(64, 1),
        callbacks=[LogOnMain(), EarlyStoppingCallback(early_stopping_patience=1)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval loss {metrics['eval_loss']:.4f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
