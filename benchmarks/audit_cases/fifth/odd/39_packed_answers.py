"""Question-answer pairs packed into rows; only answer tokens count, and rows hold different numbers of them."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH, SEP = 30, 32, 0


class Packed(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = [self.pack(g) for _ in range(size)]

    @staticmethod
    def pack(g):
        ids, labels, positions = [], [], []
        while True:
            n = int(torch.randint(2, 7, (1,), generator=g))
            word = torch.randint(1, VOCAB, (n,), generator=g).tolist()
            piece = word + [SEP] + word[::-1]
            if len(ids) + len(piece) > LENGTH:
                break
            ids += piece
            labels += [-100] * (n + 1) + word[::-1]
            positions += range(len(piece))
        rest = LENGTH - len(ids)
        ids, labels, positions = ids + [SEP] * rest, labels + [-100] * rest, positions + [0] * rest
        return tuple(torch.tensor(v) for v in (ids, labels, positions))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return dict(zip(("input_ids", "labels", "position_ids"), self.rows[i]))


class TokenSumTrainer(Trainer):
    """Sum of token losses over the number of tokens that all ranks have in this update, times the ranks,
    because DDP divides the gradients by the number of ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
        total = F.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, out) if return_outputs else loss


def main():
    set_seed(18)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=SEP, eos_token_id=SEP, use_cache=False,
        )
    )
    args = TrainingArguments(
        output_dir="packed",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = TokenSumTrainer(model=model, args=args, train_dataset=Packed(512, seed=0))
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"train loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
