"""Alternating updates: equal to a plain loop with an optimizer for each player, on any number of ranks."""

import pytest
import torch
from torch import nn

from lockstep import Follower, Player
from lockstep.core.errors import TrainingError, UsageError
from tests import player_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly

EXACT = 1e-10
KINDS = ["Adversaries", "Critics", "Taught"]


def fit(kind, settings, run_dir=None):
    return runs.fit(getattr(player_tasks, kind)(), settings, run_dir)


def settings(micro=5, **sections):
    return runs.config(batch={"global": 24, "micro": micro}, **sections)


CASES = [(kind, *cut) for kind in KINDS for cut in ((1, 24), (1, 5), (2, 12), (2, 5), (3, 3))]
CHOSEN = [("Adversaries", 2, 5), ("Critics", 3, 3), ("Taught", 1, 24)]


@pytest.mark.parametrize(("kind", "ranks", "micro"), mainly(CHOSEN, CASES))
def test_weights_are_those_of_a_plain_loop(kind, ranks, micro):
    expected = player_tasks.by_hand(getattr(player_tasks, kind)(), 8, clip_norm=0.3)
    for weights, _ in run_ranks(ranks, fit, kind, settings(micro, optim={"clip_norm": 0.3}, train={"steps": 8})):
        assert runs.difference(weights, expected) < EXACT


@pytest.mark.parametrize(
    ("kind", "ranks"), mainly([("Taught", 3)], [(kind, ranks) for kind in KINDS for ranks in (1, 3)])
)
def test_a_resumed_training_is_bit_identical(kind, ranks):
    whole, cut = zip(*run_ranks(ranks, fit_whole_and_cut, kind), strict=True)
    for one, other in zip(whole, cut, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def fit_whole_and_cut(kind):
    def train(steps, folder):
        return fit(kind, settings(train={"steps": steps}, checkpoint={"every_steps": 4}), folder)[0]

    with runs.shared_folder() as folder:
        whole = train(10, folder / "whole")
        train(4, folder / "cut")
        return whole, train(10, folder / "cut")


def test_the_log_has_the_loss_of_each_player(tmp_path):
    _, results = fit("Critics", settings(train={"steps": 3}, log={"every_steps": 3}), tmp_path / "run")
    assert {"train/loss/discriminator", "train/loss/generator", "train/grad_norm"} <= results.keys()


def test_players_and_averages_of_all_weights():
    averaged = settings(train={"ema_decay": 0.5})
    (one, _), *_ = run_ranks(1, fit, "Adversaries", averaged)
    for weights, _ in run_ranks(2, fit, "Adversaries", averaged):
        assert runs.difference(weights, one) < EXACT


class Changed(player_tasks.Adversaries):
    def __init__(self, **changes):
        super().__init__()
        vars(self).update(changes)


@pytest.mark.parametrize(
    ("changes", "sections", "words"),
    [
        ({"players": (Player("generator", "generator.*"),)}, {}, "discriminator.0.weight belongs to no player"),
        (
            {"players": (Player("discriminator", "*"), Player("generator", "generator.*"))},
            {},
            "generator.0.weight belongs to discriminator and generator",
        ),
        ({"players": (Player("discriminator", "*"), Player("generator", "gen.*"))}, {}, "generator has no trainable"),
        ({"players": (Player("discriminator", "*", every=2),)}, {}, "no player updates at every step"),
        ({"players": (Player("discriminator", "*", updates=0),)}, {}, "a count is below 1"),
        ({"players": (Player("critic", "*"),)}, {}, "Changed has no method critic_loss"),
        ({"players": ()}, {}, "there are the players"),
        ({"players": (Player("a/b", "*"),)}, {}, "a player is called 'a/b'"),
        ({"followers": (Follower("generator.", of="generator.", decay=1.5),)}, {}, "the decay 1.5 is not from 0 to 1"),
        ({"followers": (Follower("copy.", of="generator.", decay=0.9),)}, {}, "are not the same"),
        ({}, {"parallel": {"strategy": "fsdp"}}, "cannot be used with players"),
        ({}, {"train": {"unfreeze": [{"match": ["generator.*"], "epoch": 1}]}}, "cannot be used with players"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(changes, sections, words):
    with pytest.raises(UsageError, match=words) as caught:
        runs.fit(Changed(**changes), settings(**sections))
    assert caught.value.remedy
    assert "Task." in str(caught.value) or "parallel" in str(caught.value) or "train" in str(caught.value)


def test_a_player_whose_loss_misses_parameters_is_an_error():
    class Half(player_tasks.Adversaries):
        def model(self):
            model = super().model()
            model["generator"].append(nn.Linear(2, 2).double())
            return model

        def generator_loss(self, model, batch):
            return model["discriminator"](model["generator"][:-1](batch[1])).sum()

        def discriminator_loss(self, model, batch):
            return model["discriminator"](batch[0]).sum()

    with pytest.raises(Exception, match=r"2 trainable parameters got no gradient: generator\.3"):
        runs.fit(Half(), settings())


class Tied(player_tasks.Adversaries):
    def model(self):
        model = super().model()
        model["discriminator"][0].bias = model["generator"][0].bias
        return model


def test_a_parameter_of_two_players_is_refused():
    with pytest.raises(UsageError, match=r"are one parameter, which belongs to several players"):
        runs.fit(Tied(), settings())


class Named(player_tasks.Adversaries):
    """The generator has another name, too, which comes first."""

    def model(self):
        model = super().model()
        return nn.ModuleDict({"other": model["generator"], **model})


def test_a_player_owns_a_tied_parameter_by_any_of_its_names():
    plain, _ = fit("Adversaries", settings(train={"steps": 2}))
    weights, _ = runs.fit(Named(), settings(train={"steps": 2}))
    assert runs.difference({name: weights[name] for name in plain}, plain) == 0


class OneWeight(player_tasks.Adversaries):
    def weight(self, batch):
        return {"discriminator": len(batch[0])}


def test_units_of_each_player_are_needed():
    with pytest.raises(TrainingError, match="it has the units of discriminator, and not of the player generator"):
        runs.fit(OneWeight(), settings())
