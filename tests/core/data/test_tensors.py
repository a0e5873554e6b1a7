"""The tensors in batches and outputs are found, moved and pinned, and what holds them stays what it was."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.data.tensors import map_tensors, pinned, to_cpu
from lockstep.core.evaluate import split
from tests import own_tasks
from tests.ranks import run_on_python_device


def twice(tensor):
    return 2 * tensor


@dataclasses.dataclass
class Computed:
    """Its `__init__` takes only one of its fields, and computes the others."""

    points: torch.Tensor
    centre: torch.Tensor = dataclasses.field(init=False)
    name: str = dataclasses.field(init=False)

    def __post_init__(self):
        self.centre, self.more = self.points.mean(0), self.points.sum(0)
        self.name = "made"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    points: torch.Tensor


@dataclasses.dataclass
class Unfinished:
    points: torch.Tensor
    late: torch.Tensor = dataclasses.field(init=False)


class Pair(NamedTuple):
    one: torch.Tensor
    other: str


class Named(list):
    """A list that holds a name, too."""


class Moves:
    """An object that moves itself, and that nobody can look into."""

    def __init__(self, tensor, log=()):
        self._hidden = [tensor]
        self.log = list(log)

    def to(self, device, non_blocking=False):
        return Moves(self._hidden[0].to(device, non_blocking=non_blocking), [*self.log, ("to", non_blocking)])

    def pin_memory(self):
        return Moves(self._hidden[0], [*self.log, "pinned"])


class MovesInPlace:
    """Its method takes no `non_blocking`, and returns nothing."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        self.tensor = self.tensor.to(device)


def test_dataclasses_are_copied_and_not_made_anew():
    value = Computed(torch.ones(3, 2))
    found = map_tensors(value, twice)
    assert (type(found), found.name) == (Computed, "made")
    assert [t.tolist() for t in (found.points[0], found.centre, found.more)] == [[2.0, 2.0], [2.0, 2.0], [6.0, 6.0]]
    assert value.points[0].tolist() == [1.0, 1.0]
    assert map_tensors(Frozen(torch.ones(2)), twice).points.tolist() == [2.0, 2.0]
    unfinished = map_tensors(Unfinished(torch.ones(2)), twice)
    assert unfinished.points.tolist() == [2.0, 2.0]
    assert not hasattr(unfinished, "late")


def test_containers_keep_their_types_and_what_else_they_hold():
    ordered = collections.OrderedDict(b=torch.ones(1), a="text")
    counts = collections.defaultdict(list, {"x": torch.ones(1)})
    named = Named([torch.ones(1)])
    named.name = "seven"
    queue = collections.deque([torch.ones(1)], maxlen=3)
    value = {"ordered": ordered, "counts": counts, "pair": Pair(torch.ones(1), "two"), "named": named, "queue": queue}
    found = map_tensors(value, twice)
    assert {name: type(part) for name, part in found.items()} == {name: type(part) for name, part in value.items()}
    assert list(found["ordered"]) == ["b", "a"]
    assert found["counts"]["new"] == []
    assert found["named"].name == "seven"
    assert found["queue"].maxlen == 3
    parts = (found["ordered"]["b"], found["counts"]["x"], found["pair"].one, found["named"][0], found["queue"][0])
    assert [float(part) for part in parts] == [2.0] * 5
    assert "new" not in counts
    assert float(ordered["b"]) == 1


def test_what_holds_no_tensor_is_not_copied():
    value = {"names": ["a", "b"], "numbers": (1, 2.0, None), "bytes": bytearray(b"xy"), "range": range(3)}
    assert map_tensors(value, twice) is value


@pytest.mark.exhaustive  # as test_objects_on_their_way_to_the_device_stay_what_they_are
def test_encodings_and_outputs_of_hugging_face_models_keep_their_types():
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    encoding = map_tensors(BatchEncoding({"input_ids": torch.ones(2, 3)}), twice)
    assert type(encoding) is BatchEncoding
    assert encoding.input_ids.sum() == 12
    output = map_tensors(SequenceClassifierOutput(logits=torch.ones(2)), twice)
    assert type(output) is SequenceClassifierOutput
    assert output.logits.tolist() == output["logits"].tolist() == [2.0, 2.0]


def loader_for(device, **options):
    task = own_tasks.Plain()
    return Loader(MicroBatches(task.train_data(), task, 0, training=True), 0, device, **options)


def moved_to_device(device):
    """What becomes of batches on the device, and the operations that did it."""
    from tests.python_device import NAME

    place = torch.device(NAME, 0)
    sparse = torch.eye(3).to_sparse()
    batch = {
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "moves": Moves(torch.ones(2)),
        "in place": MovesInPlace(torch.ones(2)),
        "computed": Computed(torch.ones(3, 2)),
        "list": [torch.ones(2), "text"],
    }
    device.log.clear()
    found = loader_for(place).copies.begin(batch).wait()
    assert type(found["packed"]) is PackedSequence
    tensors = (found["packed"].data, found["moves"]._hidden[0], found["in place"].tensor, found["computed"].centre)
    assert all(tensor.device == place for tensor in (*tensors, found["list"][0]))
    assert found["moves"].log == [("to", True)]
    assert found["list"][1] == "text"
    # Tensors that the loader knows are copied beside the computation. The others are copied in order with it, because
    # nobody could keep their memory until the computation is done.
    copies = [one.stream for one in device.log if one.name == "aten::copy_"]
    recorded = [one.name for one in device.log if one.name.startswith("record_stream")]
    assert copies.count(0) == 3
    assert len(copies) - 3 == len(recorded) == 4
    assert not device.reads()
    assert pinned({"moves": Moves(torch.ones(2)), "sparse": sparse})["moves"].log == ["pinned"]
    back = to_cpu(found)
    assert {back["packed"].data.device.type, back["moves"]._hidden[0].device.type} == {"cpu"}
    assert back["computed"].more.device.type == "cpu"


def test_objects_on_their_way_to_the_device_stay_what_they_are():
    run_on_python_device(moved_to_device)


def pinned_expansion(device):
    found = pinned({"weights": torch.arange(3.0).expand(2, 3), "one": torch.ones(1).expand(1, 1)})
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_expanded_tensors_are_pinned():
    expected = {"weights": [[0.0, 1.0, 2.0]] * 2, "one": [[1.0]]}
    assert run_on_python_device(pinned_expansion) == expected


def lists_of_outputs(device):
    from tests.python_device import NAME

    place = torch.device(NAME, 0)
    outputs = [{"classes": torch.ones(2, 2).to(place)}, [torch.ones(1).to(place), "text"]]
    first, second = split(outputs, 2)
    return first["classes"].device.type, second[0].device.type


def test_outputs_in_lists_are_on_the_cpu_before_they_travel():
    assert run_on_python_device(lists_of_outputs) == ("cpu", "cpu")


def formatted(device):
    from tests.python_device import NAME

    picture = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    pinned_images = []
    loader = loader_for(torch.device(NAME, 0), channels_last=True)
    device.log.clear()
    before = torch.Tensor.contiguous
    torch.Tensor.contiguous = lambda tensor, **options: pinned_images.append(tensor) or before(tensor, **options)
    try:
        found = loader.copies.begin({"images": picture}).wait()["images"]
    finally:
        torch.Tensor.contiguous = before
    return (
        {tensor.device.type for tensor in pinned_images},
        found.is_contiguous(memory_format=torch.channels_last),
        {one.stream for one in device.log if one.name in ("aten::copy_", "aten::clone")},
    )


def test_memory_format_is_changed_on_the_device_beside_the_computation():
    places, is_channels_last, streams = run_on_python_device(formatted)
    assert places == {"pygpu"}
    assert is_channels_last
    assert 0 not in streams


def run_ahead(device, micro):
    from lockstep.core.data.loader import StepIterator, one_ahead
    from lockstep.core.data.order import StepPlan
    from tests.python_device import NAME

    loader = loader_for(torch.device(NAME, 0))
    plan = StepPlan(len(loader.micro_batches.data), 8, micro, 1, seed=3)
    device.log.clear()
    for micro_batches in StepIterator(loader, plan, ranks=range(1), start=0, stop=40 // 8):
        for micro_batch in one_ahead(micro_batches):
            assert micro_batch.batch is not None
            device.note("passes")
    return [one.name for one in device.log]


@pytest.mark.cases("8")
@pytest.mark.parametrize("micro", [8, 2])
def test_host_is_at_most_three_passes_ahead_of_the_device(micro):
    """It waits for events, of batches that lie behind, and never for a whole queue."""
    log = run_on_python_device(run_ahead, micro)
    events, waited, passes, ahead = {}, [], 0, []
    for name in log:
        what, _, number = name.partition(" ")
        if what == "passes":
            passes += 1
        elif what == "record_event":
            events[number] = passes
        elif what == "host_waits_for_event":
            waited.append(events[number])
            ahead.append(passes - events[number])
    assert passes == 40 // micro
    assert waited[-1] >= passes - 4
    assert set(ahead[2:]) <= {1, 2, 3}  # the device has passes to do while the host waits, and not more than these
    assert not [name for name in log if name.startswith("read")]


def test_channels_last_does_not_touch_nested_and_sparse_tensors():
    loader = loader_for(torch.device("cpu"), channels_last=True)
    nested = torch.nested.nested_tensor([torch.ones(3, 2, 2), torch.ones(3, 4, 2)], layout=torch.jagged)
    batch = [torch.zeros(1, 1, 2, 2).to_sparse(), nested]
    found = loader.copies.begin(batch).wait()
    assert found[0] is batch[0]
    assert found[1] is nested
    assert loader.micro_batches[MicroBatchPlan((0,), 0, False)].batch[0].shape[0] == 1
