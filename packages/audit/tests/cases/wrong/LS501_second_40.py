import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments, set_seed


class Reviews(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.ids = torch.from_numpy(rng.integers(1, 50, (n, 10)))
        self.labels = (self.ids[:, :5].sum(1) > self.ids[:, 5:].sum(1)).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return dict(input_ids=self.ids[i], labels=self.labels[i])


def accuracy(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, num_labels=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir="reviews", num_train_epochs=1, per_device_train_batch_size=16, per_device_eval_batch_size=16,
        learning_rate=2e-3, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2ForSequenceClassification(config), args,
        train_dataset=Reviews(256, 0), eval_dataset=Reviews(96, 1), compute_metrics=accuracy,
    )
    trainer.train()

    if trainer.is_world_process_zero():
        metrics = trainer.evaluate()
        print("final:", round(metrics["eval_accuracy"], 4))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
