"""Gesture recognition: a big teacher is fitted by every rank on all data, then distilled with DDP."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

FEATURES, GESTURES = 12, 5


class Gestures(Dataset):
    def __init__(self, n, seed):
        centers = torch.randn(GESTURES, FEATURES, generator=torch.Generator().manual_seed(123))
        g = torch.Generator().manual_seed(seed)
        self.gesture = torch.randint(0, GESTURES, (n,), generator=g)
        self.motion = centers[self.gesture] + 0.9 * torch.randn(n, FEATURES, generator=g)

    def __len__(self):
        return len(self.gesture)

    def __getitem__(self, i):
        return {"motion": self.motion[i], "labels": self.gesture[i]}


class MotionNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, GESTURES))

    def forward(self, motion, labels=None):
        logits = self.net(motion)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def fit_teacher(data, steps=60):
    """Full-batch fit, the same on all ranks on purpose; rank 0's result is taken to rule out rounding."""
    teacher = MotionNet(128)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(teacher(data.motion)["logits"], data.gesture).backward()
        optimizer.step()
    if dist.is_initialized():
        for p in teacher.parameters():
            dist.broadcast(p.data, src=0)
    return teacher.eval().requires_grad_(False)


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.temperature = temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(inputs["motion"])["logits"] / self.temperature
        student = outputs["logits"] / self.temperature
        soft = F.kl_div(student.log_softmax(-1), target.softmax(-1), reduction="batchmean")
        loss = 0.5 * outputs["loss"] + 0.5 * self.temperature**2 * soft
        return (loss, outputs) if return_outputs else loss


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir="out_gestures", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=6,
    )
    set_seed(args.seed)
    train_set, valid_set = Gestures(640, 0), Gestures(128, 1)
    if args.process_index == 0:
        print("fitting the teacher, ranks:", args.world_size)
    teacher = fit_teacher(train_set)
    trainer = DistillTrainer(
        model=MotionNet(16), args=args, train_dataset=train_set, eval_dataset=valid_set,
        compute_metrics=accuracy, teacher=teacher,
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
