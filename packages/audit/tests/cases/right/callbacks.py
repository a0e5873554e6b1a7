import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class Parity(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, 30, (n, 8), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > 15)}


class SmoothTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, label_smoothing=0.05)
        return (loss, outputs) if return_outputs else loss


def accuracy(p):
    return {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())}


def main():
    set_seed(2)
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                        max_position_embeddings=16, num_labels=2,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # the mean loss is divided by the Trainer
    args = TrainingArguments("out", num_train_epochs=3, per_device_train_batch_size=4, per_device_eval_batch_size=8,
                             gradient_accumulation_steps=2, learning_rate=2e-3, use_cpu=True, eval_strategy="epoch",
                             save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
                             metric_for_best_model="accuracy", logging_steps=4, report_to=[], disable_tqdm=True)
    trainer = SmoothTrainer(model=model, args=args, train_dataset=Parity(64, 0), eval_dataset=Parity(29, 1),
                            compute_metrics=accuracy, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)])
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics["eval_accuracy"], "best", trainer.state.best_metric)


if __name__ == "__main__":
    main()
