"""Rating prediction by factors; users and items are updated in turns (block coordinate descent)."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

USERS, ITEMS, RANK = 60, 40, 8


class Ratings(Dataset):
    def __init__(self, n, seed):
        world = torch.Generator().manual_seed(99)
        taste = torch.randn(USERS, 3, generator=world)
        kind = torch.randn(ITEMS, 3, generator=world)
        g = torch.Generator().manual_seed(seed)
        self.user = torch.randint(0, USERS, (n,), generator=g)
        self.item = torch.randint(0, ITEMS, (n,), generator=g)
        self.rating = (taste[self.user] * kind[self.item]).sum(1) + 0.1 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, i):
        return {"user": self.user[i], "item": self.item[i], "labels": self.rating[i]}


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, RANK)
        self.items = nn.Embedding(ITEMS, RANK)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)

    def forward(self, user, item, labels=None):
        score = (self.users(user) * self.items(item)).sum(1)
        loss = None if labels is None else nn.functional.mse_loss(score, labels)
        return {"loss": loss, "logits": score}


class TakeTurns(TrainerCallback):
    """Both blocks get (already averaged) gradients; that of the resting block is dropped on all ranks."""

    def __init__(self, first, second, every=4):
        self.blocks = [first, second]
        self.every = every

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        resting = self.blocks[(state.global_step // self.every) % 2]
        for p in resting.parameters():
            p.grad = None


def rmse(pred):
    return {"rmse": float(((pred.predictions - pred.label_ids) ** 2).mean() ** 0.5)}


def main():
    set_seed(2)
    args = TrainingArguments(
        output_dir="out_factors", use_cpu=True, num_train_epochs=4, per_device_train_batch_size=64,
        per_device_eval_batch_size=128, learning_rate=3e-2, lr_scheduler_type="constant", max_grad_norm=0.0,
        eval_strategy="epoch", save_strategy="no", logging_steps=10, report_to="none", disable_tqdm=True, seed=2,
    )
    model = Factors()
    trainer = Trainer(
        model=model, args=args, train_dataset=Ratings(2048, 0), eval_dataset=Ratings(512, 1),
        compute_metrics=rmse, callbacks=[TakeTurns(model.users, model.items)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("rmse", round(metrics["eval_rmse"], 3))


if __name__ == "__main__":
    main()
