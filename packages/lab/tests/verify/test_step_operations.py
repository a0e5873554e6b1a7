"""What a step does below the surface: its collectives, and where the host waits."""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
import lockstep_recipes
from lockstep.core import step as engine
from lockstep.core.parallel import signals
from lockstep.core.parallel.ddp import DDP
from lockstep.parts.operations import Results
from lockstep_lab.verify import step_operations, worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.recorder import RecorderOptions
from lockstep_lab.verify.step_operations import CoarseOperations, RandomOperations, StepOperations
from lockstep_lab.verify.worker_functions import TrainingRun
from tests import runs
from tests.processes import ROOT
from tests.ranks import run_ranks
from tests.selection import mainly

HERE = Path(__file__).resolve().parent
OWN, ODD = ROOT / "tests" / "own_tasks.py", HERE / "odd_tasks.py"
PACKAGE = Path(lockstep.__file__).parent


EARLY_STEPS = RecorderOptions(communication_steps=(1, 2, 3))


def recorded(name, file=OWN, watch=EARLY_STEPS, folder=None, **sections):
    """What was recorded on this rank of five steps of which nothing is logged."""
    settings = runs.config(task={"kind": f"{file}:{name}"}, train={"steps": 5}, log={"every_steps": 5}, **sections)
    with runs.shared_folder() as shared:
        return worker_functions.train(TrainingRun("recorded", 1, settings, str(folder or shared), TaskChanges(), watch))


def recorded_on_ranks(name, sections, wasteful=False):
    """The communication of the recorded steps, and the shapes of what was trained.

    In every step the ranks agree whether to stop, as they do where steps take a second.

    wasteful: the gradients of every micro-batch travel.
    """
    sync, signals._EVERY_S = DDP.gradient_sync, 0.0
    if wasteful:
        DDP.gradient_sync = lambda strategy, last: sync(strategy, True)
    try:
        seen = recorded(name, **sections)
    finally:
        DDP.gradient_sync, signals._EVERY_S = sync, 1.0
    return [vars(communication) for communication in seen.communication.values()], seen.trainable, seen.sharded


def test_torch_still_has_the_operators_that_are_listened_for():
    for name in (*step_operations._REDUCTIONS, *step_operations._HOST_WAITS):
        space, _, operator = name.partition("::")
        assert getattr(getattr(torch.ops, space), operator).overloads(), name


def test_the_operators_that_reduce_take_their_tensors_where_they_are_looked_for():
    for name, place in step_operations._REDUCTIONS.items():
        schema = getattr(torch.ops.c10d, name.partition("::")[2]).default._schema
        assert "Tensor" in str(schema.arguments[place].type), schema
        if place == 1:  # the input; the output comes first
            assert schema.arguments[place].name.startswith("input")


def test_alone_nobody_talks_and_nobody_waits(tmp_path):
    seen = recorded("Masked", folder=tmp_path, batch={"micro": 5}, optim={"clip_norm": 1.0})
    assert list(seen.communication) == [1, 2, 3]
    for communication in seen.communication.values():
        assert (
            communication.reductions,
            communication.own_reductions,
            communication.other_collectives,
            communication.host_waits,
        ) == ([], [], [], [])


def test_a_value_that_the_task_reads_is_the_tasks_wait(tmp_path):
    seen = recorded("Waits", ODD, folder=tmp_path, batch={"global": 20, "micro": 10})
    for communication in seen.communication.values():
        assert len(communication.host_waits) == 2
        place, ours = communication.host_waits[0]
        assert not ours
        file, _, line = place.partition(":")
        assert file == "odd_tasks.py"
        assert ".item()" in ODD.read_text().splitlines()[int(line) - 1]


def reading(path):
    """A function that reads a tensor's value, as if it were written in `path`."""
    space = {}
    exec(compile("\n\ndef read(tensor):\n    return tensor.item()\n", str(path), "exec"), space)
    return space["read"]


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("core/step.py", True),
        ("trainer.py", True),
        (Path(lockstep_recipes.__file__).parent / "tasks/toy/task.py", False),
    ],
)
def test_a_value_that_the_package_reads_is_its_own_wait_but_for_its_tasks(monkeypatch, tmp_path, path, ours):
    factors, read = engine._factors, reading(PACKAGE / path)

    def nosy(run, losses, *arguments):
        read(losses["loss"])
        return factors(run, losses, *arguments)

    monkeypatch.setattr(engine, "_factors", nosy)
    seen = recorded("Masked", folder=tmp_path)
    assert [communication.host_waits for communication in seen.communication.values()] == [
        [(f"{Path(path).name}:4", ours)]
    ] * 3


def test_comparing_and_asking_for_truth_wait_too():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with StepOperations(optimizer) as seen:
        assert torch.equal(torch.ones(2), torch.ones(2))
        assert bool(torch.ones(1) > 0)
        torch.ones(3).sum()
    assert [place.partition(":")[0] for place, _ in seen.communication.host_waits] == ["test_step_operations.py"] * 2


def test_what_an_optimizer_reads_in_its_step_is_not_counted():
    parameter = nn.Parameter(torch.ones(3))
    mine, other = torch.optim.AdamW([parameter], foreach=False), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    parameter.grad = torch.ones(3)
    with StepOperations(other) as heard:
        mine.step()
    assert heard.communication.host_waits
    with StepOperations(mine) as heard:
        mine.step()
        assert heard.communication.host_waits == []
        parameter.sum().item()
    assert len(heard.communication.host_waits) == 1


def test_afterwards_nobody_listens():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with StepOperations(optimizer) as seen:
        pass
    torch.ones(1).item()
    optimizer.step()
    assert seen.communication.host_waits == []
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_digests_tell_the_first_operation_that_differs():
    found = []
    for value in (1.0, 1.0, 2.0):
        with Results() as seen:
            start = torch.arange(3.0)
            middle = start * 2
            torch.split(middle + value, [1, 2])
            torch.empty(3)
        found.append(seen.found)
    names = [name for name, *_ in found[0]]
    assert names[-3:] == ["aten::mul", "aten::add", "aten::split_with_sizes"]
    assert found[0] == found[1]
    assert [one == other for one, other in zip(found[0], found[2], strict=True)][-3:] == [True, False, False]


def test_the_operations_of_a_step_are_the_same_when_it_is_run_again(tmp_path):
    one, other = (
        recorded("Dropout", watch=RecorderOptions(operations_step=2), folder=tmp_path / name)
        for name in ("one", "other")
    )
    assert one.communication == {}
    assert len(one.operations) > 20
    assert any("mm" in name for name, *_ in one.operations)
    assert any("backward" in name for name, *_ in one.operations)
    assert one.operations == other.operations


def test_what_draws_random_numbers_is_noted():
    with RandomOperations() as seen:
        torch.ones(2) + torch.rand(2)
        torch.nn.functional.dropout(torch.ones(2), 0.5)
    assert seen.names[0] == "rand"
    assert len(seen.names) == 2


@pytest.mark.exhaustive
def test_on_two_ranks_each_gradient_travels_once():
    answers = run_ranks(2, recorded_on_ranks, "Deep", {"batch": {"micro": 4}})
    for talks, trainable, sharded in answers:
        assert not sharded
        elements = sum(math.prod(shape) for shape in trainable.values())
        for communication in talks:
            assert sum(communication["reductions"]) == elements
            assert communication["host_waits"] == []
            assert communication["own_reductions"] == [1]  # the units of one head


def test_on_two_ranks_gradients_that_travel_with_each_micro_batch_are_seen():
    talks, trainable, _ = run_ranks(2, recorded_on_ranks, "Deep", {"batch": {"micro": 4}}, True)[0]
    elements = sum(math.prod(shape) for shape in trainable.values())
    assert [sum(communication["reductions"]) for communication in talks] == [3 * elements] * 3


@pytest.mark.parametrize("clip", mainly([0.5], [None, 0.5]))
def test_on_two_ranks_sharded_gradients_travel_once_with_their_padding(clip):
    sections = {"batch": {"micro": 4}, "parallel": {"strategy": "fsdp"}, "optim": {"clip_norm": clip}}
    talks, trainable, sharded = run_ranks(2, recorded_on_ranks, "Deep", sections)[0]
    assert sharded
    padded = sum(2 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in trainable.values())
    assert padded > sum(math.prod(shape) for shape in trainable.values())
    for communication in talks:
        assert sum(communication["reductions"]) == padded
        assert any("allgather" in name for name in communication["other_collectives"])
        assert communication["host_waits"] == []
        assert communication["own_reductions"] == ([1] if clip is None else [1, 1])  # the units; the norm


def test_listening_ends_where_a_step_fails(tmp_path):
    def fail(*_):
        raise RuntimeError("the sheep are asleep")

    factors, engine._factors = engine._factors, fail
    try:
        with pytest.raises(RuntimeError, match="asleep"), contextlib.suppress(KeyError):
            recorded("Masked", watch=RecorderOptions(communication_steps=(0,)), folder=tmp_path)
    finally:
        engine._factors = factors
    torch.ones(1).item()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda outputs, labels: outputs @ outputs.T, ("matmul", 1)),
        (lambda outputs, labels: torch.cat([outputs, outputs]) @ torch.cat([outputs, outputs]).T, ("matmul", 2)),
        (lambda outputs, labels: torch.cdist(outputs, outputs), ("cdist", 1)),
        (lambda outputs, labels: labels[:, None] == labels, ("eq", 1)),
        (lambda outputs, labels: outputs[:, :1] - outputs[:, 0], ("sub", 1)),
        (lambda outputs, labels: labels.argsort(), ("argsort", 1)),
        (lambda outputs, labels: outputs.sort(dim=0), ("sort", 1)),
        (lambda outputs, labels: outputs[:, 0].topk(3), ("topk", 1)),
        (lambda outputs, labels: outputs.logcumsumexp(0), ("logcumsumexp", 1)),
        (lambda outputs, labels: outputs.topk(2), None),
        (lambda outputs, labels: outputs.sort(), None),
        (lambda outputs, labels: outputs.cumsum(dim=1), None),
        (lambda outputs, labels: outputs.log_softmax(dim=0), None),
        (lambda outputs, labels: outputs[:, :1] - labels, None),  # by mistake
        (lambda outputs, labels: outputs.T @ outputs, None),
        (lambda outputs, labels: outputs * outputs, None),
    ],
)
def test_operations_that_compare_samples_are_found(operation, found):
    outputs, labels = torch.randn(7, 5), torch.arange(7.0)
    with step_operations.ComparingOperations(7) as operations:
        operation(outputs, labels)
    assert [(name, rows) for name, _, rows in operations.found] == ([found] if found else [])
    assert all(place.startswith("test_step_operations.py:") for _, place, _ in operations.found)
    with step_operations.ComparingOperations(7) as operations:
        operations.is_paused = True
        operation(outputs, labels)
    assert operations.found == []


@pytest.mark.parametrize(
    ("operation", "coarse"),
    [
        (lambda inputs: inputs.float().square().mean().to(inputs), torch.float32),
        (lambda inputs: inputs.softmax(0, dtype=torch.float32).double(), torch.float32),
        (lambda inputs: inputs.to(torch.complex64), torch.complex64),
        (lambda inputs: inputs.float() + inputs.bfloat16(), torch.bfloat16),
        (lambda inputs: torch.zeros(3).add_(inputs), torch.float32),
        (lambda inputs: inputs + torch.arange(3).float().cos(), None),
        (lambda inputs: torch.zeros_like(inputs, dtype=torch.float32) + 1, None),
        (lambda inputs: inputs.softmax(0).argmax().float(), None),
    ],
)
def test_a_coarser_number_format_is_noticed_where_something_is_rounded_to_it(operation, coarse):
    with CoarseOperations() as found:
        operation(torch.rand(3, dtype=torch.float64))
    assert found.epsilon == (torch.finfo(coarse).eps if coarse else 0.0)
    assert bool(found.words) == bool(coarse)
    assert not coarse or found.words.startswith(f"{str(coarse).removeprefix('torch.')} at test_step_operations.py:")


def test_a_coarser_number_format_is_noticed_in_a_backward_pass():
    inputs = torch.rand(3, dtype=torch.float64, requires_grad=True)
    inputs.register_hook(lambda gradient: gradient.half().double())
    with CoarseOperations() as found:
        inputs.sum().backward()
    assert found.epsilon == torch.finfo(torch.float16).eps
