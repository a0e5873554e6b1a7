"""A text message on a new best result. `command` is any program that accepts the text: an SMS script, mail.

lockstep train digits train.parts='[{kind: examples/parts/best_message.py:BestMessage, command: [notify-send]}]'
"""

import subprocess

from lockstep import Part


class BestMessage(Part):
    required = False  # a message that cannot be sent must not end the training

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

    def state_dict(self):  # so that a resumed training does not report its first result as the best
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]
