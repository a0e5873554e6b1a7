import torch
import torch.nn.functional as F
from transformers import Trainer


class DistillationTrainer(Trainer):
    """The teacher is the same on every rank, frozen, and not wrapped."""

    def __init__(self, *args, teacher, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.temperature = temperature
        self.alpha = alpha
        # the loss below is a plain mean, so the trainer shall divide by the accumulation steps
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(input_ids=inputs["input_ids"]).logits
        t = self.temperature
        kd = F.kl_div(
            F.log_softmax(outputs.logits / t, -1), F.softmax(target / t, -1), reduction="batchmean"
        ) * t**2
        loss = self.alpha * outputs.loss + (1 - self.alpha) * kd
        return (loss, outputs) if return_outputs else loss
