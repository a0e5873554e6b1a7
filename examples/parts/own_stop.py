"""Your own stop: the training ends when its loss has risen above a multiple of its lowest value.

lockstep train digits train.parts='[{kind: examples/parts/own_stop.py:EndsWhenLossRises, factor: 3}]'
"""

from lockstep import Part


class EndsWhenLossRises(Part):
    def __init__(self, factor=2.0):
        self.factor, self.lowest = factor, float("inf")

    def log_entry(self, training):
        loss = training.results["train/loss"]
        self.lowest = min(self.lowest, loss)
        training.log("loss/above_lowest", loss / self.lowest)
        if loss > self.factor * self.lowest:
            training.request_stop(f"the loss is {loss:.4g}; its lowest value was {self.lowest:.4g}")

    def state_dict(self):
        return {"lowest": self.lowest}

    def load_state_dict(self, state):
        self.lowest = state["lowest"]
