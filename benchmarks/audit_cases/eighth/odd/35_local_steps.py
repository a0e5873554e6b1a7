"""Local SGD: each process takes its own optimizer steps, the weights are averaged every SYNC_EVERY steps."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

SYNC_EVERY = 6
DIM = 16


class Quadrants(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, DIM, generator=g)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long() + 2 * (self.x[:, 2] > 0.3).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class LocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # the bare module: no gradient exchange between two averaging points
        outputs = self.model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class AverageWeights(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % SYNC_EVERY and state.global_step != state.max_steps:
            return
        with torch.no_grad():
            flat = torch.cat([p.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            start = 0
            for p in model.parameters():
                p.copy_(flat[start : start + p.numel()].view_as(p))
                start += p.numel()


def main():
    set_seed(14)
    args = TrainingArguments(
        output_dir="runs/local", use_cpu=True, num_train_epochs=4, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, optim="sgd", learning_rate=0.2, lr_scheduler_type="cosine", logging_steps=18,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=14,
    )
    trainer = LocalTrainer(
        model=Mlp(), args=args, train_dataset=Quadrants(768, 1), eval_dataset=Quadrants(256, 2),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[AverageWeights()],
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {scores['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
