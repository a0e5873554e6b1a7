"""A text message on a new best result. `command` is any program that takes the text: a script of an SMS service, mail.

lockstep train digits train.parts='[{kind: examples/parts/best_message.py:BestMessage, command: [notify-send]}]'
"""

import subprocess

from lockstep import Part


class BestMessage(Part):
    required = False  # a message that cannot be sent ends no training

    def __init__(self, command, result="eval/loss", mode="min"):
        self.command, self.result, self.sign = command, result, 1 if mode == "min" else -1
        self.best = float("inf")

    def after_evaluation(self, training):
        value = self.sign * training.results[self.result]
        if value >= self.best:
            return
        self.best = value  # on every rank: all ranks have the same results
        if training.rank == 0:
            text = f"{training.folder.name}: {self.result} {self.sign * value:.4g} after step {training.step}"
            subprocess.run([*self.command, text], check=True, timeout=20)

    def state_dict(self):  # so that a training that goes on does not call its first result the best
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]
