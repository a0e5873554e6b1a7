"""A checkpoint of any strategy at any world size goes on in any other, with its optimizer state."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from lockstep import Trainer
from lockstep.core.checkpoint import store
from tests import own_tasks, rank_cases, runs
from tests.core.test_strategies import STRATEGIES, settings_for
from tests.ranks import run_ranks
from tests.selection import mainly

OPTIONS = {"eval_length": 10}


def settings(name, steps):
    world, parallel = STRATEGIES[name]
    train = {"steps": steps, "ema_decay": 0.7, "eval_every_steps": steps}
    return settings_for(world, parallel, train=train, checkpoint={"mode": "sync"})


@pytest.fixture(scope="module")
def undisturbed():
    return runs.by_hand(own_tasks.Deep(), 12)[0]


@pytest.fixture(scope="module")
def runs_of_6_steps():
    return {}


@pytest.fixture
def saved(request, runs_of_6_steps, tmp_path_factory):
    """A run of 6 steps with a strategy; an epoch has 10."""
    name = request.param
    if name not in runs_of_6_steps:
        folder = runs_of_6_steps[name] = tmp_path_factory.mktemp("saved")
        run_ranks(STRATEGIES[name][0], runs.fit_kind, "Deep", OPTIONS, settings(name, 6), folder)
    return runs_of_6_steps[name]


def pairs(always):
    """From every strategy to every other; `make test` takes only those that are `always` tested."""
    every = [(one, other) for one in range(len(STRATEGIES)) for other in range(len(STRATEGIES))]
    names = list(STRATEGIES)
    return [
        pytest.param(names[one], names[other], marks=() if always(one, other) else pytest.mark.exhaustive)
        for one, other in every
    ]


@pytest.mark.parametrize(("saved", "name"), pairs(lambda one, other: (one, other) == (2, 1)), indirect=["saved"])
def test_checkpoint_goes_on_anywhere_as_if_undisturbed(saved, undisturbed, name, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run")
    for weights, results in run_ranks(STRATEGIES[name][0], runs.fit_kind, "Deep", OPTIONS, settings(name, 12), folder):
        assert results["step"] == 12
        assert weights.pop("calls") == 12
        assert runs.difference(weights, {key: tensor for key, tensor in undisturbed.items() if key != "calls"}) < 1e-10
    assert "from step 6" in (folder / "train.log").read_text()


@pytest.mark.parametrize("saved", mainly(["fsdp 2"], ["ddp 2", "fsdp 2", "hybrid 2x2"]), indirect=True)
def test_checkpoint_is_read_by_torchs_own_tools(saved, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = store.listed(saved / "checkpoints")[0]
    dcp_to_torch_save(found.path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    ours = {name: entry["shape"] for name, entry in found.index.items()}
    assert {name: list(tensor.shape) for name, tensor in whole.items()} == ours


@pytest.mark.parametrize(("saved", "name"), pairs(lambda one, other: (one, other) == (2, 1)), indirect=["saved"])
def test_any_ranks_export_and_evaluate_the_same_from_one_checkpoint(saved, name, tmp_path):
    task = own_tasks.Deep(**OPTIONS)
    alone = Trainer(settings("single", 6), run_dir=saved, quiet=True)
    expected, results = (
        load_file(alone.export(tmp_path / "alone", task, program=False)),
        alone.evaluate(own_tasks.Deep(**OPTIONS)),
    )
    for answer in run_ranks(
        STRATEGIES[name][0], rank_cases.export_and_evaluate, saved, settings(name, 6), OPTIONS, tmp_path / "many"
    ):
        assert answer["loss"] == pytest.approx(results["loss"], rel=1e-12)
    found = load_file(tmp_path / "many" / "model.safetensors")
    assert list(found) == list(expected)
    assert all(bool((found[key] == expected[key]).all()) for key in found)
    program = torch.export.load(tmp_path / "many" / "model.pt2").module()
    batch = list(torch.utils.data.default_collate([task.train_data()[index] for index in range(3)]))
    with torch.no_grad():
        torch.testing.assert_close(program(batch=batch), task.predict(alone.model, batch), rtol=0, atol=1e-12)
