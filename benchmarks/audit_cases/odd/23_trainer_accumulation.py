import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Counting(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = (torch.randint(0, 40, (n, 1), generator=g) + torch.arange(12)) % 40

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Report(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            print(f"step {state.global_step}: eval loss {metrics['eval_loss']:.4f}")


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=32, n_layer=1, n_head=2))
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model=model, args=args, train_dataset=Counting(256, 1), eval_dataset=Counting(64, 2), callbacks=[Report()]
    ).train()


if __name__ == "__main__":
    main()
