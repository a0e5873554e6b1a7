"""Causal LM with a loss of its own (label smoothing on answer tokens only)."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
VOCAB = 48


class QA(Dataset):
    """question tokens (ignored in the loss) followed by answer tokens of varying number"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(2, 9, (1,), generator=g))
            q = torch.randint(4, VOCAB, (12 - length,), generator=g)
            a = (q[:1] + torch.arange(length)) % VOCAB
            ids = torch.cat([q, a])
            labels = ids.clone()
            labels[: len(q)] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class AnswerTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
        target = labels[:, 1:].reshape(-1)
        total = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum", label_smoothing=0.1)
        if num_items_in_batch is None:
            loss = total / (target != -100).sum()
        else:
            loss = total / num_items_in_batch
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


def main():
    set_seed(31)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    args = TrainingArguments(
        output_dir="out", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=0.05, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
        logging_steps=5, save_strategy="no", eval_strategy="epoch", prediction_loss_only=True,
        report_to=[], disable_tqdm=True, seed=31,
    )
    trainer = AnswerTrainer(model=model, args=args, train_dataset=QA(160, 0), eval_dataset=QA(32, 1))
    trainer.train()
    norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
    if trainer.is_world_process_zero():
        evals = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
        print("eval", [round(e, 5) for e in evals], "norm", round(norm.item(), 6))


if __name__ == "__main__":
    main()
