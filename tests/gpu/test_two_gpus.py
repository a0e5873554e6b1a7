"""Two ranks on two GPUs, with NCCL: against one GPU, `verify`, a rank that is killed, and ranks that wait for another.

With `LOCKSTEP_TEST_DEVICE=cpu`, the same tests run on two CPU ranks with gloo.
"""

import json
import re

import pytest
import torch

from lockstep.core.checkpoint import files, store
from lockstep.core.parallel.world import join_world
from tests import own_tasks, processes, runs
from tests.gpu import cases
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, offloaded": {"strategy": "fsdp", "cpu_offload": True},
    "fsdp, hybrid": {"strategy": "fsdp", "shard_ranks": 1},
}
ENDLESS = ["log.writers=[text_log,json_lines]", "train.steps=1000000", "train.eval_every_steps=0", "log.every_steps=10"]
SETTINGS = [
    "log.writers=[text_log,json_lines]",
    "train.steps=40",
    "train.eval_every_steps=20",
    "checkpoint.every_steps=10",
    "log.every_steps=10",
]


@pytest.mark.parametrize("kind", ["Masked", "Deep", "TwoHeads"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_train_the_weights_of_one_in_float32(strategy, kind, two):
    options = {"dtype": torch.float32}
    expected, _ = runs.by_hand(getattr(own_tasks, kind)(**options), clip_norm=0.5)
    settings = runs.config(device=two, batch={"micro": 7}, optim={"clip_norm": 0.5}, parallel=STRATEGIES[strategy])
    expected.pop("calls", None)
    for found in run_ranks(2, cases.fit_on_rank, kind, options, settings):
        found.pop("calls", None)
        assert runs.difference(found, expected) < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_gpus_train_the_weights_of_fp32_to_the_rounding_of_the_format(precision, strategy, two):
    options = {"dtype": torch.float32}
    expected, _ = runs.by_hand(own_tasks.Deep(**options))
    settings = runs.config(device=two, precision=precision, parallel=STRATEGIES[strategy])
    expected.pop("calls")
    for found in run_ranks(2, cases.fit_on_rank, "Deep", options, settings):
        found.pop("calls")
        assert runs.difference(found, expected) < 0.2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_trainings_alike_have_the_same_bits(strategy, two):
    settings = runs.config(device=two, parallel=STRATEGIES[strategy], compute=cases.DETERMINISTIC)
    arguments = ("Deep", {"dtype": torch.float32, "dropout": 0.1}, settings)
    (expected, other), again = (run_ranks(2, cases.fit_on_rank, *arguments) for _ in range(2))
    assert not cases.same(other, expected), "the ranks differ"
    assert not cases.same(again[0], expected)


def broadcast_batch(device):
    """What this rank gets of a batch on the device of rank 0, and its own device."""
    with join_world(device) as world:
        batch = world.broadcast({"inputs": torch.arange(3.0, device=world.device) + world.rank})
        return batch["inputs"].tolist(), str(batch["inputs"].device), str(world.device)


def test_batch_of_rank_0_arrives_on_the_device_of_each_rank(two):
    for values, device, own in run_ranks(2, broadcast_batch, two):
        assert values == [0, 1, 2]
        assert device == own


def test_verify_shows_promises_on_two_gpus(two, tmp_path):
    done = processes.lockstep(
        "verify", "digits", f"device={two}", "--quick", "--nproc", 2, "--run-dir", tmp_path / "verify"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "verify" / "verify.json").read_text())["checks"]
    statuses = [check["status"] for check in checks]
    assert "fault" not in statuses, done.stdout
    assert statuses.count("passed") > len(statuses) / 2, done.stdout


def final_state(run):
    newest = store.listed(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


def test_killed_rank_is_started_again_and_ends_with_the_weights_of_an_undisturbed_run(two, tmp_path):
    command = ("train", "toy", *SETTINGS, f"device={two}", "--nproc", 2, "--run-dir")
    undisturbed = processes.lockstep(*command, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    fault = f"1:20:evaluating:kill:{tmp_path / 'killed'}"
    done = processes.lockstep(*command, tmp_path / "killed-once", LOCKSTEP_FAIL_AT=fault)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "rank 1 was killed by signal 9" in done.stderr
    (step, expected), (found_step, found) = (final_state(tmp_path / name) for name in ("undisturbed", "killed-once"))
    assert found_step == step == 40
    assert not cases.same(found, expected)


TASKS = """
import os, time
from tests.own_tasks import Plain

class Hangs(Plain):
    calls = 0
    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == 25 and os.environ["RANK"] == "0":
            time.sleep(1000)
        return super().loss(model, batch)
"""


def test_ranks_that_wait_in_a_collective_end_with_a_report_that_names_the_rank_which_does_not_come(two, tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    target = f"{tmp_path / 'tasks.py'}:Hangs"
    arguments = ["parallel.timeout_s=20", f"device={two}", "--nproc", 2, "--max-restarts", 0]
    done = processes.lockstep("train", target, *ENDLESS, *arguments, "--run-dir", tmp_path / "run")
    assert done.returncode == 1, done.stderr
    assert "no rank made progress for 20 s" in done.stderr
    (report,) = (tmp_path / "run").glob("hang-2*.txt")
    text = report.read_text()
    assert re.search(r"rank 0 \(.*\): training, step 23, silent for \d+ s, at .*tasks.py:\d+ in loss", text)
    assert "time.sleep(1000)" in text
    assert re.search(r"rank 1 \(.*\): training, step 23", text)
