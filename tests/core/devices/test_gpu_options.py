"""Options of GPUs: how they reach torch, and what a run says about its GPUs."""

import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Trainer
from lockstep.cli import allocator
from lockstep.configs import config_file
from lockstep.core.blocks import compile_modules
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.devices import backends, cuda, memory_history
from lockstep.core.errors import MemoryShortage, UsageError
from lockstep.core.optim import OptimConfig, build_optimizer
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import join_world
from lockstep.trainer import assemble
from tests import own_tasks, runs
from tests.core.devices.test_python_device import train
from tests.ranks import run_on_python_device, run_ranks
from tests.selection import mainly


def switches():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, attention


class Looking(own_tasks.Plain):
    """Notes torch's switches in each loss."""

    seen = ()

    def loss(self, model, batch):
        self.seen = (*self.seen, switches())
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ({}, ("highest", True, False, (True, True, True))),
        ({"matmul_precision": "highest"}, ("highest", False, False, (True, True, True))),
        ({"matmul_precision": "high"}, ("high", True, False, (True, True, True))),
        ({"cudnn_benchmark": True}, ("highest", True, True, (True, True, True))),
        ({"sdpa_backends": ["flash", "math"]}, ("highest", True, False, (True, False, True))),
    ],
)
def test_switches_hold_for_a_training_and_no_longer(tmp_path, compute, expected):
    before, task = switches(), Looking()
    Trainer(runs.config(compute=compute, train={"steps": 2}), run_dir=tmp_path, quiet=True).fit(task)
    assert set(task.seen) == {expected}
    assert switches() == before


def test_switches_are_as_before_after_an_error():
    before = switches()

    def fail():
        with backends.chosen("medium", False, ["math"]):
            assert switches()[0] == "medium"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert switches() == before


# ---- fused AdamW


def operations_of(device, folder, optim):
    return train(device, folder, {"optim": {"lr": 0.1, **optim}, "train": {"steps": 2}})[1]


@pytest.mark.parametrize(
    ("optim", "fused"),
    mainly(
        [({}, "aten::_fused_adamw_"), ({"fused": False}, None)],
        [
            ({}, "aten::_fused_adamw_"),
            ({"name": "Adam"}, "aten::_fused_adam_"),
            ({"fused": False}, None),
            ({"args": {"foreach": False}}, None),
            ({"name": "SGD"}, None),
        ],
    ),
)
def test_a_gpu_updates_by_adams_fused_kernel_unless_the_config_says_otherwise(tmp_path, optim, fused):
    used = {name for name in run_on_python_device(operations_of, str(tmp_path / "run"), optim) if "_fused_" in name}
    assert used == ({fused} if fused else set())


@pytest.mark.parametrize(("strategy", "fused"), [("ddp", True), ("fsdp", False)])
def test_a_cpu_updates_whole_parameters_by_the_fused_kernel_and_shards_without(strategy, fused):
    assert run_ranks(2, is_fused, strategy) == [fused, fused]


def is_fused(strategy):
    config = config_file.parse(runs.config(parallel={"strategy": strategy}), needs_task=False)
    with join_world("cpu") as world:
        return bool(assemble.in_memory(config, own_tasks.Plain(), world).run.state.optimizer.defaults["fused"])


def test_a_run_that_was_begun_without_the_kernel_says_so_when_it_resumes(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    about = json.loads((tmp_path / "environment.json").read_text())
    for kept, noted in ((about, 0), (about | {"fuses_adam": None}, 1)):
        left = {name: value for name, value in kept.items() if value is not None}
        (tmp_path / "environment.json").write_text(json.dumps(left))
        runs.fit(own_tasks.Plain(), runs.config(train={"steps": 8 if noted else 6}), tmp_path)
        assert (tmp_path / "train.log").read_text().count("optim.fused=false keeps") == noted


def test_models_that_the_kernel_cannot_update_are_updated_without():
    model = nn.Linear(2, 2)
    assert not build_optimizer(model, OptimConfig()).defaults["fused"]
    assert build_optimizer(model, OptimConfig(), fuses_adam=True).defaults["fused"]
    assert not build_optimizer(model, OptimConfig(fused=False), fuses_adam=True).defaults["fused"]
    for other in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(6)[::2]):
        model.other = nn.Parameter(other)
        assert not build_optimizer(model, OptimConfig(), fuses_adam=True).defaults["fused"]


# ---- SyncBatchNorm


class Normed(own_tasks.Plain):
    """A model with SyncBatchNorm, of inputs with two dimensions."""

    def model(self):
        return nn.Sequential(nn.SyncBatchNorm(10).double(), super().model())


def train_with_sync_batch_norm(folder):
    """The kinds of layers of the model that is trained, its weights, and the log."""
    kinds = []

    class Noting(Normed):
        def loss(self, model, batch):
            kinds.append(type(model[0]).__name__)
            return super().loss(model, batch)

    weights, _ = runs.fit(Noting(), runs.config(train={"steps": 3}), Path(folder))
    return set(kinds), weights, (Path(folder) / "train.log").read_text()


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_on_cpus_train_with_batch_norm_in_place_of_sync_batch_norm(tmp_path, monkeypatch, world):
    """Also on a machine with GPUs: the device of the run decides."""
    for kinds, weights, log in run_ranks(world, train_with_sync_batch_norm, str(tmp_path / "run")):
        assert kinds == {"BatchNorm"}
        assert "0.running_mean" in weights
        assert ("1 SyncBatchNorm modules cannot run on this device (cpu)" in log) == (world > 1)


def train_on(folder, task, **changes):
    """Train on the device in Python, in a process that has it. Returns the results."""
    import lockstep
    from lockstep.core.parallel import world
    from tests.python_device import NAME

    world.pick_device = lambda *_, **__: torch.device(NAME, 0)
    config = runs.config(log={"writers": [], "model_summary": False}, **changes)
    return Trainer(lockstep.core.config.sections.RunConfig(**config), run_dir=folder, quiet=True).fit(task)


def kinds_on_gpu(device, folder):
    kinds = set()

    class Noting(Normed):
        def loss(self, model, batch):
            kinds.add(type(model[0]).__name__)
            return super().loss(model, batch)

    train_on(folder, Noting(), train={"steps": 1})
    return kinds


def test_sync_batch_norm_stays_on_a_gpu(tmp_path):
    assert run_on_python_device(kinds_on_gpu, str(tmp_path / "run")) == {"SyncBatchNorm"}


# ---- torch.compile


def test_mode_and_dynamic_shapes_reach_torch_compile(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: given.append(options))
    compute = ComputeConfig(compile="model", compile_mode="reduce-overhead", compile_dynamic=False)
    compile_modules(nn.Linear(1, 1), [], compute)
    compile_modules(nn.Linear(1, 1), [], ComputeConfig(compile="model"))
    assert given == [
        {"backend": "inductor", "mode": "reduce-overhead", "dynamic": False},
        {"backend": "inductor", "mode": None, "dynamic": None},
    ]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"compile": "blocks", "compile_mode": "reduce-overhead"}, "CUDA graphs, which need compile: model"),
        ({"compile_mode": "max-autotune"}, "CUDA graphs, which need compile: model"),
        ({"compile": "model", "compile_mode": "max-autotune", "compile_backend": "eager"}, "backend inductor"),
        ({"sdpa_backends": []}, "at least 1 item"),
        ({"sdpa_backends": ["xformers"]}, "flash"),
        ({"matmul_precision": "tf32"}, "highest"),
    ],
)
def test_options_that_do_not_go_together_are_errors(keys, problem):
    with pytest.raises(ValueError, match=problem):
        ComputeConfig(**keys)
    assert ComputeConfig(compile="model", compile_mode="reduce-overhead").uses_cuda_graphs
    assert not ComputeConfig(compile="blocks", compile_mode="max-autotune-no-cudagraphs").uses_cuda_graphs


# ---- NUMA


def test_a_rank_is_bound_to_the_cpus_near_its_gpu_for_the_training(monkeypatch):
    """torch finds the CPUs. Only its questions to CUDA are answered here, and the check for numactl is left out."""
    numa = cuda.numa
    before = os.sched_getaffinity(0)
    of = "gpu" if hasattr(numa, "_get_gpu_count") else "device"  # since torch 2.15
    monkeypatch.setattr(numa, f"_get_numa_node_index_for_{of}_index", lambda **_: 0)
    monkeypatch.setattr(numa, f"_get_{of}_count", lambda: 2)
    monkeypatch.setattr(numa, "_raise_if_binding_invalid", lambda **_: None)
    gpus = [cuda.Cuda(torch.device("cuda", index)) for index in range(2)]
    bound = []
    for gpu in gpus:
        with gpu.near_cpus("exclusive" if len(before) > 1 else "node"):
            bound.append(os.sched_getaffinity(0))
            read = subprocess.check_output([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"])
            assert int(read) == len(bound[-1])
    assert os.sched_getaffinity(0) == before
    assert all(cpus <= before for cpus in bound)
    assert len(before) == 1 or not bound[0] & bound[1]


def test_a_binding_that_fails_is_an_error_with_the_key():
    gpu = cuda.Cuda(torch.device("cuda", 0))
    with pytest.raises(UsageError, match="could not be bound to the CPUs near cuda:0") as raised, gpu.near_cpus("node"):
        pass
    assert raised.value.where == "compute.numa_binding=node"


def test_results_of_cuda_graphs_are_copied_because_the_next_call_overwrites_them(monkeypatch):
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    memory = torch.zeros(())

    def loss(model, batch):
        return {"loss": memory.fill_(batch)}

    forward = Forward(nn.Linear(1, 1), loss, uses_graphs=True)
    first, second = forward(1.0), forward(2.0)
    assert (float(first["loss"]), float(second["loss"])) == (1.0, 2.0)
    assert forward(3.0, lambda model, batch: (memory, "text"))[0] is not memory
    assert len(marks) == 3
    plain = Forward(nn.Linear(1, 1), loss)
    assert plain(1.0)["loss"] is memory
    assert len(marks) == 3


# ---- memory


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("auto", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cpu", {}, {}),
        ("mps", {}, {}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ("cuda", {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_settings_of_the_allocator_are_the_users_if_there_are_any(monkeypatch, device, given, expected):
    for name in allocator.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    allocator.use_expandable_segments(device)
    found = {name: os.environ.pop(name) for name in allocator.SETTINGS if name in os.environ}
    assert found == expected


def test_torch_has_the_private_functions_that_record_memory():
    """They are private: where torch renames them or their arguments, `core/devices/memory_history.py` must follow."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert {"enabled", "stacks", "max_entries"} <= recording.keys()
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
    # A torch without CUDA lacks the function itself, but its compiler knows the name.
    rules = Path(torch.__file__).parent / "_dynamo" / "trace_rules.py"
    assert "torch._C._cuda_attach_out_of_memory_observer" in rules.read_text()


def test_the_first_shortage_writes_what_the_allocator_recorded(tmp_path, monkeypatch, capsys):
    calls, observers = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": []})
    memory_history._observe.cache_clear()
    file = tmp_path / "memory" / "rank0.pickle"
    with memory_history.recorded(file):
        assert not file.exists()
        observers[0](0, 1, 2, 3)
        assert pickle.loads(file.read_bytes()) == {"segments": []}
        file.unlink()
        observers[0](0, 1, 2, 3)
    observers[0](0, 1, 2, 3)
    assert not file.exists()
    assert len(observers) == 1
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}]
    assert str(file) in capsys.readouterr().err
    (tmp_path / "in the way").write_text("")
    with memory_history.recorded(tmp_path / "in the way" / "rank0.pickle"):
        observers[0](0, 1, 2, 3)
    assert "was not written" in capsys.readouterr().err
    memory_history._observe.cache_clear()


class Greedy(own_tasks.Plain):
    """Asks for more memory than there is, in one loss."""

    calls = 0

    def loss(self, model, batch):
        Greedy.calls += model.training
        if Greedy.calls == 3:
            torch.empty(10**6, device=batch[0].device)
        return super().loss(model, batch)


def run_out_of_memory(device, folder):
    """Train with a memory that does not suffice once. Returns the steps that were trained, in two starts."""
    device.limit = 10**6
    changes = {"compute": {"memory_snapshot": True}, "train": {"steps": 3}}
    try:
        with pytest.raises(MemoryShortage):
            train_on(folder, Greedy(), **changes)
        return train_on(folder, Greedy(), **changes)["step"]
    finally:
        device.limit = None


def test_a_run_that_runs_out_of_memory_writes_a_snapshot_and_goes_on_at_the_next_start(tmp_path):
    assert run_on_python_device(run_out_of_memory, str(tmp_path)) == 3
    assert (tmp_path / "memory" / "rank0.pickle").exists()


# ---- what a run says


def test_environment_names_gpus_and_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SECRET_KEY", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    Trainer(runs.config(train={"steps": 1}), run_dir=tmp_path / "cpu", quiet=True).fit(own_tasks.Plain())
    variables = json.loads((tmp_path / "cpu" / "environment.json").read_text())["variables"]
    expected = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert expected.items() <= variables.items()
    assert "SECRET_KEY" not in variables
    run_on_python_device(train, str(tmp_path / "gpu"), {"train": {"steps": 1}})
    assert json.loads((tmp_path / "gpu" / "environment.json").read_text())["gpus"] == ["device in Python"]


def test_versions_of_cuda_are_asked_of_torch(monkeypatch):
    from lockstep.core.devices import Cuda

    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA L4 {index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)  # a build with CUDA would look for a GPU
    assert Cuda(torch.device("cuda", 0)).libraries() == {
        "cuda": "13.0",
        "cudnn": 92000,
        "nccl": "2.27.5",
        "gpus": ["NVIDIA L4 0", "NVIDIA L4 1"],
    }


@pytest.mark.parametrize("graphs", [False, True])
def test_gradients_of_a_cuda_graph_leave_its_memory_before_the_next_micro_batch(graphs, monkeypatch):
    kept = []

    class Watched(own_tasks.Plain):
        def model(self):
            model = super().model()
            model[0].weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad.data_ptr()))
            return model

    monkeypatch.setattr(ComputeConfig, "uses_cuda_graphs", graphs)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    settings = runs.config(batch={"global": 24, "micro": 8}, train={"steps": 2})
    weights, _ = runs.fit(Watched(), settings)
    expected, _ = runs.by_hand(own_tasks.Plain(), 2)
    assert runs.difference(weights, expected) < 1e-10
    first, second, third = kept[:3]
    assert (first != second) == graphs
    assert second == third
