"""A compiled model has the names of the plain one: in checkpoints, exports, and the files of a loop."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.core import task_checks
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.parallel.wrapped_model import is_compiled, without_wrappers
from tests import own_tasks, runs
from tests.ranks import run_ranks

# torch's compiler reads the gradient of what a module before it has computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def compiled(module):
    return torch.compile(module, backend="aot_eager")


class Compiled(own_tasks.Masked):
    """How: which modules are compiled."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def model(self):
        model = super().model()
        if self.how in ("inside", "both"):
            model[2] = compiled(model[2])
        return compiled(model) if self.how in ("model", "both") else model


def settings(steps, **sections):
    return runs.config(train={"steps": steps}, checkpoint={"every_steps": 4}, **sections)


@pytest.mark.parametrize("how", ["model", "inside", "both"])
def test_names_are_plain_and_the_code_is_compiled(how):
    task = Compiled(how)
    given = task.model()
    model = without_wrappers(given, "Task.model")
    assert list(model.state_dict()) == NAMES
    assert is_compiled(model)
    inputs = torch.randn(3, 10, dtype=torch.float64)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    plain = nn.Sequential(nn.Linear(10, 5))
    assert without_wrappers(plain, "") is plain
    counted = without_wrappers(torch.compile(plain, backend=count), "")
    assert counted is plain
    counted(torch.randn(2, 10))
    assert len(graphs) == 1
    with torch.no_grad():
        assert torch.equal(given(inputs), model(inputs))  # the script may call what it has


@pytest.mark.parametrize("how", ["model", "inside", "both"])
def test_runs_go_on_from_plain_to_compiled_and_back(how, tmp_path):
    whole, _ = runs.fit(own_tasks.Masked(), settings(8), tmp_path / "whole")
    for name, first, second in (("to", "", how), ("from", how, "")):
        runs.fit(Compiled(first), settings(4), tmp_path / name)
        weights, _ = runs.fit(Compiled(second), settings(8), tmp_path / name)
        assert list(weights) == NAMES
        assert runs.difference(weights, whole) < 1e-12


def test_an_export_of_a_compiled_model_loads_in_plain_torch(tmp_path):
    task = Compiled("both")
    weights, _ = runs.fit(task, settings(4), tmp_path / "run")
    trainer = lockstep.Trainer(settings(4), run_dir=tmp_path / "run", quiet=True)
    trainer.export(tmp_path / "weights", task=task)
    plain = own_tasks.Masked().model()
    plain.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    assert runs.difference(plain.state_dict(), weights) == 0


def test_a_checkpoint_with_the_names_of_torch_compile_is_read(tmp_path, monkeypatch):
    """As earlier versions have saved it."""
    whole, _ = runs.fit(own_tasks.Masked(), settings(8), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(task_checks, "without_wrappers", lambda model, where: model)
        runs.fit(Compiled("both"), settings(4), tmp_path / "run")
    (index,) = tmp_path.glob("run/checkpoints/*/index.json")
    assert "model._orig_mod.2._orig_mod.weight" in index.read_text()
    weights, _ = runs.fit(Compiled("both"), settings(8), tmp_path / "run")
    assert list(weights) == NAMES
    assert runs.difference(weights, whole) < 1e-12


def fit_sharded(how):
    return runs.fit(Compiled(how), settings(4, parallel={"strategy": "fsdp"}))[0]


def test_sharded_models_have_plain_names():
    expected, _ = runs.fit(own_tasks.Masked(), settings(4))
    for weights in run_ranks(2, fit_sharded, "both"):
        assert list(weights) == NAMES
        assert runs.difference(weights, expected) < 1e-10


def test_a_loop_has_plain_names(tmp_path):
    model = compiled(own_tasks.Masked().model())
    data = own_tasks.Masked().train_data()
    options = {"global_batch": 24, "steps": 2, "quiet": True, "run_dir": tmp_path / "run"}
    config = {"log.writers": ["json_lines"], "device": "cpu", "log.pictures": 0}
    loop = lockstep.Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), data, config=config, **options)
    for step in loop:
        for inputs, targets, mask in step:
            called = model if step.number == 1 else loop.model
            step.backward(((called(inputs) - targets).square() * mask).sum(), units=mask.sum(), reduction="sum")
    loop.save(tmp_path / "weights.pt")
    loop.close()
    own_tasks.Masked().model().load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


class Wrapped(own_tasks.Masked):
    def __init__(self, wrapper):
        super().__init__()
        self.wrapper = wrapper

    def model(self):
        return self.wrapper(super().model())


def fit_wrapped():
    try:
        runs.fit(Wrapped(nn.parallel.DistributedDataParallel), settings(2))
    except LockstepError as error:
        return str(error)


def test_a_model_that_is_spread_already_is_refused():
    """DDP needs a group of ranks, which `Task.model` has on several ranks."""
    with pytest.raises(UsageError, match="the model is wrapped in DataParallel") as caught:
        runs.fit(Wrapped(nn.DataParallel), settings(2))
    assert "give the module inside (.module)" in str(caught.value)
    for text in run_ranks(2, fit_wrapped):
        assert text is not None
        assert "DistributedDataParallel" in text
