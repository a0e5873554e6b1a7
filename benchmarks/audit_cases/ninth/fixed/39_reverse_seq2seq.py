"""Sequence reversal with a small T5; exact match of the generated text picks the best checkpoint."""
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

PAD, EOS, FIRST, SYMBOLS = 0, 1, 2, 8
MAX_LEN = 6


class Reversal(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.rows = [
            rng.integers(FIRST, FIRST + SYMBOLS, size=int(rng.integers(2, MAX_LEN))).tolist()
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {"input_ids": row + [EOS], "labels": row[::-1] + [EOS]}


def collate(features):
    def pad(rows, value):
        return torch.tensor([r + [value] * (MAX_LEN - len(r)) for r in rows])

    ids = pad([f["input_ids"] for f in features], PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": pad([f["labels"] for f in features], -100),
    }


class ExactMatchTrainer(Seq2SeqTrainer):
    """Evaluates by greedy decoding instead of the teacher-forced loss."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        loader = self.get_eval_dataloader(eval_dataset)
        self.model.eval()
        correct, total = 0, 0
        for batch in loader:
            batch = self._prepare_inputs(batch)
            with torch.no_grad():
                out = self.model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=MAX_LEN,
                    do_sample=False,
                )
            hits = []
            for guess, truth in zip(out[:, 1:].tolist(), batch["labels"].tolist()):
                guess = guess[: guess.index(EOS)] if EOS in guess else guess
                truth = truth[: truth.index(EOS)]
                hits.append(int(guess == truth))
            hits = self.accelerator.gather_for_metrics(torch.tensor(hits, device=self.args.device))
            correct += int(hits.sum())
            total += len(hits)
        metrics = {f"{metric_key_prefix}_exact_match": correct / total}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def main():
    args = Seq2SeqTrainingArguments(
        output_dir="out_reverse",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="exact_match",
        greater_is_better=True,
        logging_steps=10,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        seed=9,
    )
    config = T5Config(
        vocab_size=FIRST + SYMBOLS, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD, dropout_rate=0.0,
    )
    trainer = ExactMatchTrainer(
        model=T5ForConditionalGeneration(config),
        args=args,
        train_dataset=Reversal(1600, seed=0),
        eval_dataset=Reversal(192, seed=1),
        data_collator=collate,
    )
    trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("final:", final)


if __name__ == "__main__":
    main()
