"""Models that a forward pass moves: a note, and a number of passes that a resumed run keeps."""

import torch
from torch import nn

from lockstep import LockstepError
from tests import own_tasks, runs


class Moving(nn.Module):
    """A trained layer; and what each forward pass changes."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear, self.norm = kind, nn.Linear(10, 5).double(), nn.BatchNorm1d(10).double()
        self.teacher = nn.Linear(10, 5).double().requires_grad_(False)
        self.teacher.load_state_dict(self.linear.state_dict())
        self.register_buffer("mean", torch.zeros(10).double())

    def forward(self, inputs):
        if self.training and self.kind in ("teacher", "through data"):
            for one, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                with torch.no_grad():
                    (one if self.kind == "teacher" else one.data).lerp_(other, 0.1)
        if self.training and self.kind == "buffer":
            self.mean = self.mean * 0.9 + inputs.mean(0)
        return self.linear(self.norm(inputs) - self.mean) + self.teacher(inputs)


class Task(own_tasks.Plain):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def model(self):
        return Moving(self.kind)


def log_of(kind, folder, *, steps, micro, allow_change=()):
    """The log of a training, or the text of its error."""
    settings = runs.config(train={"steps": steps}, schedule={"total_steps": 9}, batch={"global": 6, "micro": micro})
    try:
        runs.fit(Task(kind), settings, folder, allow_change=allow_change)
    except LockstepError as error:
        return str(error)
    return (folder / "train.log").read_text()


def test_what_forward_passes_change_is_noted_and_parameters_fix_the_number_of_passes(tmp_path):
    written = {"teacher": "teacher.bias, teacher.weight", "through data": "teacher.bias, teacher.weight"}
    for kind, names in (written | {"buffer": "mean", "nothing": ""}).items():
        folder = tmp_path / kind.replace(" ", "-")
        log = log_of(kind, folder, steps=2, micro=3)
        note = f"note: each forward pass changes {names}, once for each of the 2 micro-batches of a step"
        assert (note in log) == bool(names), kind
        assert ("each forward pass changes" in log) == bool(names), (
            kind
        )  # statistics of BatchNorm have a note of theirs
        assert ("it determines the training here" in log) == (kind in written), kind
        again = log_of(kind, folder, steps=3, micro=2)
        refused = f"each forward pass changes {names}, and a step had 2 passes on each rank and has 3 now"
        assert (refused in again) == (kind in written), kind
        if kind in written:
            assert "batch.micro" in again.partition("or Trainer(allow_change=")[2]
            assert log_of(kind, folder, steps=3, micro=4) == (folder / "train.log").read_text()  # 2 passes, too
            allowed = log_of(kind, folder, steps=4, micro=2, allow_change=["batch.micro"])
            assert f"warning: {refused}" in allowed, kind
