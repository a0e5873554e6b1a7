"""Seq2seq: reverse digit strings with a tiny T5. Own optimizer and own warm-up / cosine schedule."""
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
    set_seed,
)

PAD, EOS, FIRST = 0, 1, 2
LENGTH = 6


class Reverse(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.digits = torch.from_numpy(rng.integers(0, 10, (n, LENGTH))) + FIRST

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, i):
        src = torch.cat([self.digits[i], torch.tensor([EOS])])
        tgt = torch.cat([self.digits[i].flip(0), torch.tensor([EOS])])
        return {"input_ids": src, "attention_mask": torch.ones_like(src), "labels": tgt}


def digit_accuracy(pred):
    guess = np.asarray(pred.predictions)[:, 1 : LENGTH + 1]
    gold = pred.label_ids[:, :LENGTH]
    return {"digit_accuracy": float((guess[:, : gold.shape[1]] == gold).mean())}


def build_optimizer(model, train_size, args):
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        lr=args.learning_rate,
    )
    steps_per_epoch = train_size // (args.per_device_train_batch_size * args.world_size)
    total = int(steps_per_epoch * args.num_train_epochs)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=int(0.1 * total), num_training_steps=total
    )
    return optimizer, scheduler


def main():
    set_seed(17)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=FIRST + 10, d_model=48, d_kv=24, d_ff=96, num_layers=1, num_decoder_layers=1, num_heads=2,
            pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD, dropout_rate=0.0,
        )
    )
    args = Seq2SeqTrainingArguments(
        output_dir="runs/reverse",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=5e-3,
        predict_with_generate=True,
        generation_max_length=LENGTH + 2,
        average_tokens_across_devices=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=17,
    )
    train, test = Reverse(960, 1), Reverse(128, 2)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=digit_accuracy,
        optimizers=build_optimizer(model, len(train), args),
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        rates = [h["learning_rate"] for h in trainer.state.log_history if "learning_rate" in h]
        print(f"last learning rate {rates[-1]:.2e}  digit accuracy {scores['eval_digit_accuracy']:.3f}")


if __name__ == "__main__":
    main()
