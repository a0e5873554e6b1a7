"""The examples of docs/global_loss.md and docs/players.md."""

import runpy
from pathlib import Path

import pytest
import torch

from tests import runs
from tests.ranks import run_ranks
from tests.selection import mainly

ADAM = {"args": {"betas": [0.5, 0.999]}, "lr": 1e-3}
EXAMPLES = Path(__file__).parents[1] / "examples"


def fit(file, name, settings):
    with runs.shared_folder() as folder:
        return runs.fit(runpy.run_path(str(EXAMPLES / file))[name](), settings, folder / "run")


@pytest.mark.exhaustive  # test_global_loss.py trains such towers
def test_the_towers_learn_which_caption_belongs_to_a_picture():
    settings = runs.config(batch={"global": 128}, train={"epochs": 6, "steps": None, "eval_every_epochs": 6})
    settings["optim"] = {}
    for _, results in run_ranks(2, fit, "towers_task.py", "Towers", settings):
        assert results["eval/accuracy"] > 0.93
        assert "eval/loss" not in results


@pytest.mark.parametrize("name", mainly(["Dcgan"], ["Dcgan", "WassersteinGan"]))
def test_adversaries_train_the_same_weights_on_two_ranks(name):
    settings = runs.config(batch={"global": 64}, train={"steps": 6}, optim=ADAM)
    (one, _), *_ = run_ranks(1, fit, "gan_task.py", name, settings)
    for two, _ in run_ranks(2, fit, "gan_task.py", name, settings):
        assert runs.difference(two, one) < 1e-3  # float32


@pytest.mark.exhaustive
def test_the_generator_learns_where_digits_have_ink():
    settings = runs.config(batch={"global": 64}, train={"steps": 200}, optim=ADAM)
    weights, _ = fit("gan_task.py", "Dcgan", settings)
    task = runpy.run_path(str(EXAMPLES / "gan_task.py"))["Dcgan"]()
    data = task.train_data()
    real = torch.stack([task.prepare(data[index], 0, True)[0] for index in range(300)]).mean(dim=0)

    def likeness(model):
        torch.manual_seed(1)
        drawn = model["generator"](torch.randn(300, 16)).detach().mean(dim=0)
        return float(torch.corrcoef(torch.stack([real.flatten(), drawn.flatten()]))[0, 1])

    torch.manual_seed(0)
    model = task.model()
    assert likeness(model) < 0.3
    model.load_state_dict(weights)
    assert likeness(model) > 0.5
