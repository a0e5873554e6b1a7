"""Trainings on one GPU: against plain torch on the CPU, number formats, resuming, compiling, and `verify`."""

import json

import pytest
import torch

from lockstep import Trainer
from lockstep.configs import config_file
from tests import own_tasks, processes, runs
from tests.gpu import cases

pytestmark = pytest.mark.gpu
TASKS = {"convolutions": cases.Convolutions, "attention": cases.Attention}


@pytest.mark.parametrize("kind", ["Masked", "TwoHeads", "Plain", "Deep"])
def test_weights_are_those_of_plain_torch_on_the_cpu(kind, place):
    task = getattr(own_tasks, kind)()
    expected, _ = runs.by_hand(getattr(own_tasks, kind)(), clip_norm=0.5)
    settings = place.settings(batch={"global": 24, "micro": 7}, optim={"clip_norm": 0.5})
    found = cases.weights(task, settings)
    for tensors in (expected, found):
        tensors.pop("calls", None)  # a count of passes, of which micro-batches have more
    assert runs.difference(found, expected) < 1e-10


def test_moving_averages_and_unfreezing_are_those_of_the_cpu(place):
    sections = {"train": {"ema_decay": 0.9, "unfreeze": [{"match": ["blocks.*"], "step": 7}]}}
    on_cpu, _ = runs.fit(own_tasks.Deep(eval_length=60), runs.config(**sections))
    assert runs.difference(cases.weights(own_tasks.Deep(eval_length=60), place.settings(**sections)), on_cpu) < 1e-10


def digits(place, folder, precision):
    settings = ["train.steps=60", "train.epochs=null", "train.eval_every_epochs=null", "train.eval_every_steps=60"]
    settings += ["log.every_steps=10", "log.writers=[json_lines]", "log.pictures=0"]
    config = config_file.load("digits", [*settings, f"device={place.key}", f"precision={precision}"])
    results = Trainer(config, run_dir=folder / precision, quiet=True).fit()
    return cases.logged(folder / precision, "train/loss"), results["eval/accuracy"]


@pytest.fixture(scope="module")
def digits_in_fp32(_place, tmp_path_factory):
    return digits(_place, tmp_path_factory.mktemp("digits"), "fp32")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loss_curve_of_digits_is_that_of_fp32(precision, place, tmp_path, digits_in_fp32):
    expected, accuracy = digits_in_fp32
    found, found_accuracy = digits(place, tmp_path, precision)
    assert found.keys() == expected.keys()
    first = expected[min(expected)]
    assert all(abs(found[step] - expected[step]) < 0.1 * first for step in expected)
    assert found[60] < 0.5 * first
    assert abs(found_accuracy - accuracy) < 0.05


@pytest.mark.parametrize("precision", ["fp16"])
def test_fp16_overflows_at_first_and_then_learns(precision, place):
    with cases.prepared(cases.Overflows(), place.settings(precision=precision)) as run:
        scale = run.state.precision.loss_scale
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        cases.take_steps(run, 1)
        assert run.state.skipped == 1
        assert not cases.same(run.model.state_dict(), before)
        cases.take_steps(run, 12)
        assert 1 <= run.state.skipped < 13
        assert run.state.precision.loss_scale < scale
        assert cases.same(run.model.state_dict(), before)
        assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", TASKS)
def test_resumed_training_has_the_same_bits(kind, precision, place, tmp_path):
    settings = place.settings(
        precision=precision,
        compute=cases.DETERMINISTIC,
        optim={"clip_norm": 1.0},
        train={"steps": 12, "ema_decay": 0.9},
    )
    expected = cases.weights(TASKS[kind](), settings, tmp_path / "straight")
    again = cases.weights(TASKS[kind](), settings, tmp_path / "again")
    assert not cases.same(again, expected), "two trainings alike differ"
    cases.weights(TASKS[kind](), settings | {"train": {"steps": 5, "ema_decay": 0.9}}, tmp_path / "resumed")
    resumed = cases.weights(TASKS[kind](), settings, tmp_path / "resumed")
    assert not cases.same(resumed, expected)


def test_checkpoint_of_the_gpu_goes_on_on_the_cpu_and_back(place, tmp_path):
    expected, _ = runs.fit(own_tasks.Deep(), runs.config(train={"steps": 15}))
    for key, steps in ((place.key, 5), ("cpu", 10), (place.key, 15)):
        if place.python and key == "cpu":
            pytest.skip("the device in Python takes the place of the CPU")
        found = cases.weights(own_tasks.Deep(), runs.config(device=key, train={"steps": steps}), tmp_path / "run")
    assert runs.difference(found, expected) < 1e-10


@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled_training_is_the_same_to_rounding(what, processes_place):
    backend = "inductor" if processes_place.kind == "cuda" else "aot_eager"
    kind = {"dtype": torch.float32}
    expected = cases.weights(own_tasks.Deep(**kind), processes_place.settings())
    compute = {"compile": what, "compile_backend": backend}
    found = cases.weights(own_tasks.Deep(**kind), processes_place.settings(compute=compute))
    for tensors in (expected, found):
        tensors.pop("calls")
    assert runs.difference(found, expected) < 1e-4


def test_verify_shows_promises_on_one_gpu(processes_place, tmp_path):
    key = f"device={processes_place.key}"
    done = processes.lockstep("verify", "digits", key, "--quick", "--nproc", 1, "--run-dir", tmp_path / "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "verify" / "verify.json").read_text())["checks"]
    by_status = {check["name"]: check["status"] for check in checks}
    assert "fault" not in by_status.values(), done.stdout
    assert {by_status[name] for name in ("resume", "determinism")} == {"passed"}, done.stdout
