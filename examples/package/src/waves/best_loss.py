"""A Part: it follows the loss, and reports the best one when the training ends."""

from lockstep import Part


class BestLoss(Part):
    def __init__(self):
        self.best = float("inf")

    def after_step(self, training):
        self.best = min(self.best, training.results.get("train/loss", self.best))

    def end(self, training):
        training.tell(f"best loss: {self.best:.4g}")
