"""Two-digit addition as language modelling; evaluation counts answers that are right in every digit."""
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

PLUS, EQUALS, VOCAB = 10, 11, 12
PROMPT = 6
LENGTH = PROMPT + 3


class Sums(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.randint(0, 50, (size,), generator=g)
        b = torch.randint(0, 10, (size,), generator=g)
        total = a + b
        cols = [a // 10, a % 10, torch.full_like(a, PLUS), b // 10, b % 10, torch.full_like(a, EQUALS)]
        cols += [total // 100, total // 10 % 10, total % 10]
        self.ids = torch.stack(cols, 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[:PROMPT] = -100
        return {"input_ids": self.ids[i], "labels": labels}


class AdditionTrainer(Trainer):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        model = self.model
        model.eval()
        flags = []
        for batch in self.get_eval_dataloader(eval_dataset):
            ids = batch["input_ids"][:, :PROMPT]
            with torch.no_grad():
                for _ in range(LENGTH - PROMPT):
                    logits = model(input_ids=ids).logits[:, -1]
                    ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            right = (ids == batch["input_ids"]).all(1)
            flags.append(self.accelerator.gather_for_metrics(right))
        flags = torch.cat(flags).float()
        metrics = {f"{metric_key_prefix}_exact_match": flags.mean().item()}
        self.log(metrics)
        return metrics


def main():
    set_seed(17)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )
    args = TrainingArguments(
        output_dir="addition",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=20,
        learning_rate=5e-3,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = AdditionTrainer(
        model=model, args=args, train_dataset=Sums(1024, seed=0), eval_dataset=Sums(200, seed=1)
    )
    trainer.train()
    if trainer.is_world_process_zero():
        curve = [r["eval_exact_match"] for r in trainer.state.log_history if "eval_exact_match" in r]
        print("exact match per epoch:", [round(v, 4) for v in curve])


if __name__ == "__main__":
    main()
