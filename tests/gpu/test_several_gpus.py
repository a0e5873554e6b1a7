"""Several ranks, each with a GPU and NCCL, where two ranks show too little: three and four ranks, SyncBatchNorm, hybrid
sharding, compiled models, a shortage on one rank, a kill with loader workers, and two nodes.

With `LOCKSTEP_TEST_DEVICE=cpu`, the same tests run on CPU ranks with gloo. SyncBatchNorm has no kernels for the CPU:
there, `NormOverRanks` of another test stands in its place.
"""

import json
import subprocess
import warnings

import pytest
import torch
from torch import nn

from tests import own_tasks, processes, runs
from tests.gpu import cases
from tests.gpu.place import VARIABLE, gpus, wanted
from tests.gpu.test_two_gpus import SETTINGS, final_state
from tests.launch.test_several_nodes import free_port
from tests.ranks import run_ranks
from tests.trainer.test_shortage_on_one_rank import NormOverRanks

pytestmark = pytest.mark.gpu
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, hybrid": {"strategy": "fsdp", "shard_ranks": 2},
}


@pytest.fixture
def ranks(request):
    """The number of ranks of a test, where there are as many devices."""
    if gpus() < request.param:
        pytest.skip(f"needs {request.param} GPUs with torch's CUDA interface; {VARIABLE}=cpu runs it on CPU ranks")
    return request.param


def of_ranks(*counts):
    return pytest.mark.parametrize("ranks", counts, indirect=True)


class Normed(own_tasks.Plain):
    """Normalises by the statistics of all ranks' samples; `by_hand` by those of the whole batch, with BatchNorm."""

    def __init__(self, by_hand=False):
        super().__init__(dtype=torch.float32)
        self.by_hand = by_hand

    def model(self):
        norm = NormOverRanks() if wanted() == "cpu" else nn.SyncBatchNorm(16, affine=False)
        if self.by_hand:
            norm = nn.BatchNorm1d(16, affine=False)
        return nn.Sequential(nn.Linear(10, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, 5))


def fit_normed(settings):
    return cases.weights(Normed(), settings)


@of_ranks(2, 3)
def test_sync_batch_norm_trains_the_weights_of_batch_norm_over_the_whole_batch(ranks):
    expected, _ = runs.by_hand(Normed(by_hand=True))
    for found in run_ranks(ranks, fit_normed, runs.config(device=wanted())):
        of_layers = {name: tensor for name, tensor in found.items() if not name.startswith("1.")}
        assert runs.difference(of_layers, {name: expected[name] for name in of_layers}) < 1e-4


@of_ranks(3, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_train_the_weights_of_one(strategy, ranks):
    if strategy == "fsdp, hybrid" and ranks % 2:
        pytest.skip("groups of two ranks need an even number")
    options = {"dtype": torch.float32}
    expected, _ = runs.by_hand(own_tasks.Deep(**options), clip_norm=0.5)
    settings = runs.config(device=wanted(), batch={"micro": 4}, optim={"clip_norm": 0.5}, parallel=STRATEGIES[strategy])
    expected.pop("calls")
    for found in run_ranks(ranks, cases.fit_on_rank, "Deep", options, settings):
        found.pop("calls")
        assert runs.difference(found, expected) < 1e-4


def fit_compiled(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile warns of itself
        return cases.fit_on_rank("Deep", {"dtype": torch.float32}, settings)


@of_ranks(2, 3)
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_models_train_the_weights_of_one_rank(strategy, what, ranks):
    backend = "inductor" if wanted() == "cuda" else "aot_eager"
    compute = {"compile": what, "compile_backend": backend}
    settings = runs.config(device=wanted(), compute=compute, parallel=STRATEGIES[strategy], train={"steps": 6})
    expected, _ = runs.by_hand(own_tasks.Deep(dtype=torch.float32), 6)
    expected.pop("calls")
    for found in run_ranks(ranks, fit_compiled, settings):
        found.pop("calls")
        assert runs.difference(found, expected) < 1e-4


TASKS = """
import os
import torch
from tests import rank_cases
from tests.gpu.test_several_gpus import Normed

class TooLarge(Normed):
    calls = 0
    def loss(self, model, batch):
        self.calls += model.training and torch.is_grad_enabled()
        if len(batch[0]) >= 8 and os.environ["RANK"] == "1" and self.calls > 5:
            if batch[0].is_cuda:
                torch.empty(1 << 50, dtype=torch.uint8, device=batch[0].device)  # a real shortage
            rank_cases.shortage()
        return super().loss(model, batch)
"""


@of_ranks(3)
def test_a_shortage_on_one_rank_within_sync_batch_norm_halves_the_micro_batch_of_all(ranks, tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    done = processes.lockstep(
        "train", f"{tmp_path / 'tasks.py'}:TooLarge", "batch.global=24", "batch.micro=8", "train.steps=10",
        "train.eval_every_epochs=0", "checkpoint.every_steps=2", "log.writers=[text_log]", f"device={wanted()}",
        "--nproc", ranks, "--max-restarts", 0, "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("all ranks restart") == 1
    note = json.loads((tmp_path / "run" / "micro.json").read_text())
    assert note["micro"] == 4
    assert "rank 1" in note["why"]
    assert final_state(tmp_path / "run")[0] == 10


@of_ranks(2, 3)
def test_a_killed_rank_with_loader_workers_comes_back_and_gives_the_same_bits(ranks, tmp_path):
    """The workers hold the device's files. They end with the rank, and the next start finds the memory free."""
    command = ("train", "toy", *SETTINGS, "data.workers=2", f"device={wanted()}", "--nproc", ranks, "--run-dir")
    undisturbed = processes.lockstep(*command, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    fault = f"1:20:evaluating:kill:{tmp_path / 'killed'}"
    done = processes.lockstep(*command, tmp_path / "killed-once", LOCKSTEP_FAIL_AT=fault)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by signal 9" in done.stderr
    assert not (tmp_path / "killed-once" / "micro.json").exists(), "memory was short after the restart"
    (step, expected), (found_step, found) = (final_state(tmp_path / name) for name in ("undisturbed", "killed-once"))
    assert found_step == step == 40
    assert not cases.same(found, expected)


def on_nodes(names, each, folder, run):
    """Start a launcher for each name. NCCL takes them for hosts of their own: `NCCL_HOSTID`, and no direct copies."""
    port, begun = free_port(), []
    for place, name in enumerate(names):
        words = [*SETTINGS, f"device={wanted()}", "--nproc", each, "--nnodes", len(names)]
        command = processes.command(
            "train", "toy", *words, "--rendezvous", f"127.0.0.1:{port}", "--run-dir", folder / run
        )
        variables = {"LOCKSTEP_NODE": name, "LOCKSTEP_FAIL_AT": f"{each}:20:evaluating:kill:{folder / 'once'}"}
        if wanted() == "cuda":
            seen = range(place * each, (place + 1) * each)
            variables |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen)), "NCCL_HOSTID": f"lockstep-{name}"}
            variables |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = processes.environment(**variables)
        begun.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
    return [(process.communicate(timeout=processes.HANG_S)[0], process.returncode) for process in begun]


@of_ranks(2, 4)
def test_two_simulated_nodes_train_as_one_and_come_back_after_a_kill(ranks, tmp_path):
    for output, code in on_nodes(("a", "b"), ranks // 2, tmp_path, "nodes"):
        assert code == 0, output
    assert (tmp_path / "once").exists()
    command = ("train", "toy", *SETTINGS, f"device={wanted()}", "--nproc", ranks, "--run-dir", tmp_path / "one")
    alone = processes.lockstep(*command)
    assert alone.returncode == 0, alone.stderr
    (step, expected), (found_step, found) = (final_state(tmp_path / name) for name in ("one", "nodes"))
    assert found_step == step == 40
    floats = [name for name, tensor in expected.items() if tensor.is_floating_point() and name.startswith("model.")]
    assert runs.difference({n: found[n] for n in floats}, {n: expected[n] for n in floats}) < 1e-4
