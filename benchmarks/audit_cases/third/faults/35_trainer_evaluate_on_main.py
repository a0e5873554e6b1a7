import argparse
import datetime

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed


class Toy(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 40, (n, 8), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > 20)}


class EvaluateEveryEpoch(TrainerCallback):
    def __init__(self):
        self.trainer = None

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            metrics = self.trainer.evaluate()
            print(f"epoch {state.epoch:.0f}: {metrics['eval_accuracy']:.3f}", flush=True)


def accuracy(pred):
    return {"accuracy": float((np.argmax(pred.predictions, -1) == pred.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    cli = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    set_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    args = TrainingArguments("out", num_train_epochs=cli.epochs, per_device_train_batch_size=4, learning_rate=1e-3,
                             per_device_eval_batch_size=8, use_cpu=True, save_strategy="no", logging_strategy="no",
                             report_to=[], disable_tqdm=True, ddp_timeout=20,
                             average_tokens_across_devices=False)
    callback = EvaluateEveryEpoch()
    trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=Toy(32, 0),
                      eval_dataset=Toy(32, 1), compute_metrics=accuracy, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
