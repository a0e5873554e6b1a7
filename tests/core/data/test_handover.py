"""What a loader worker hands over is what it made, or an error that names the part which cannot be handed over."""

import threading

import numpy as np
import pytest
import torch

from lockstep import LockstepError
from lockstep.core import shortages
from lockstep.core.data import fingerprint, handover
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from tests import own_tasks

CPU = torch.device("cpu")
PLANS = [MicroBatchPlan((first, first + 1), 0, False) for first in range(0, 12, 2)]


class Collates(own_tasks.Plain):
    """A batch as `make` makes it from inputs; `kept` lives as long as the task."""

    def __init__(self, make):
        super().__init__()
        self.make, self.kept = make, {"tensor": torch.zeros(2, 10), "array": np.zeros((2, 10))}

    def collate(self, samples):
        return self.make(torch.stack([sample[0] for sample in samples]), self.kept)


def batches(make, workers):
    """The batches, as arrays. Those of a worker are looked at when the worker has made all of them."""
    task = Collates(make)
    loader = Loader(MicroBatches(task.train_data(), task, 3, training=True), workers, CPU)
    made = loader.run(lambda: PLANS)
    return [
        {name: np.array(np.asarray(value)) for name, value in micro_batch.collated.items()}
        for micro_batch in (list(made) if workers else made)
    ]


def filled(inputs, kept):
    kept["tensor"].copy_(inputs)
    np.copyto(kept["array"], inputs.numpy())
    return {"tensor": kept["tensor"], "part": kept["tensor"][:, 1:], "array": kept["array"]}


def viewed_later(inputs, kept):
    """The tensor of the first batch; later batches have what an array shows that views it."""
    if "view" not in kept:
        kept["first"], kept["view"] = inputs, inputs.numpy()
    return {"tensor": kept["first"], "seen": kept["view"].copy()}


MAKES = {
    "a view after the tensor": lambda inputs, kept: {"tensor": inputs, "view": inputs.numpy()},
    "a view before the tensor": lambda inputs, kept: {"view": inputs.numpy(), "tensor": inputs},
    "a view of a part": lambda inputs, kept: {"tensor": inputs, "view": inputs[:, 3:5].numpy().T},
    "a view in another place": viewed_later,
    "memory that is filled again": filled,
    "memory of NumPy": lambda inputs, kept: {"tensor": torch.from_numpy(inputs.numpy().copy())},
    "a stretched tensor": lambda inputs, kept: {"tensor": inputs[:1].expand(5, 10), "view": inputs.numpy()},
}


@pytest.mark.parametrize("small", [0, 1 << 14])  # in shared memory, and through the pipe
def test_a_worker_hands_over_what_it_made(small, monkeypatch):
    monkeypatch.setattr(handover, "_SMALL", small)
    for name, make in MAKES.items():
        for one, other in zip(batches(make, workers=0), batches(make, workers=1), strict=True):
            assert one.keys() == other.keys()
            for key in one:
                assert np.array_equal(one[key], other[key]), f"{name}: {key}"


def test_tensors_are_the_same_through_the_pipe_and_through_shared_memory(monkeypatch):
    base = torch.arange(24.0).view(2, 3, 4)
    sent = {
        "transposed": base.transpose(0, 2),
        "a part": base[:, 1:, ::2],
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "a number": torch.tensor(7),
        "bf16": torch.rand(3).bfloat16(),
        "complex": torch.rand(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "with a gradient": torch.rand(3, requires_grad=True),
    }
    for room in (1 << 30, 2, 0):
        monkeypatch.setattr(handover, "_SMALL", 0)
        monkeypatch.setattr(shortages, "free_files", lambda room=room: room * 8)
        loader = Loader(MicroBatches(range(4), Collates(lambda *_: sent), 0, training=True), 1, CPU)
        task = loader.micro_batches.task
        task.collate = lambda samples: sent
        (found,) = loader.run(lambda: PLANS[:1])
        for name, tensor in sent.items():
            other = found.collated[name]
            assert torch.equal(other, tensor), name
            assert other.dtype == tensor.dtype
            assert other.requires_grad == tensor.requires_grad
            assert other.stride() == torch.empty_like(tensor).stride()
            other.detach().zero_()  # it can be written
        in_shared = sum(tensor.is_shared() for tensor in found.collated.values())
        assert in_shared == min(room, len(sent) - 1)  # nothing is in the empty tensor


class Breaks:
    """It can be pickled, and not be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


FAULTS = {
    "batch['more'][1], a generator: ": lambda inputs: {"x": inputs, "more": [1, (number for number in [1])]},
    "batch['lock'], a lock: ": lambda inputs: {"x": inputs, "lock": threading.Lock()},
    "batch['f'], a function: ": lambda inputs: {"x": inputs, "f": lambda: 1},
    "batch['y'], a Tensor: ": lambda inputs: {"x": inputs, "y": inputs * torch.ones(1, requires_grad=True)},
    "cannot be unpickled: ValueError: invalid literal": lambda inputs: {"x": inputs, "object": Breaks()},
}


def test_what_a_worker_cannot_hand_over_is_named():
    for text, make in FAULTS.items():
        task = Collates(lambda inputs, kept, make=make: make(inputs))
        loader = Loader(MicroBatches(task.train_data(), task, 3, training=True), 1, CPU)
        with pytest.raises(LockstepError) as caught:
            next(loader.run(lambda: PLANS))
        assert text in str(caught.value), text
        assert caught.value.where == "Task.collate"
        assert "data.workers=0" in caught.value.remedy


def test_a_raw_sample_that_cannot_be_handed_over_does_not_stop_a_look():
    data = [(number, threading.Lock()) for number in range(3)]
    task = own_tasks.Plain()
    loader = Loader(MicroBatches(data, task, 3, training=True), 1, CPU)
    assert loader.read_apart([(0, 0), (1, 0)]) == {}
    with pytest.raises(LockstepError, match=r"list\.__getitem__: a loader worker cannot hand over sample\[1\], a lock"):
        fingerprint.sample(data, 1, in_worker=True)
