"""What is trainable is a function of the step, whatever came before."""

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.core.blocks import find_blocks
from lockstep.core.config.sections import TrainConfig
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.unfreeze import Stage, Unfreezing
from tests import own_tasks, runs
from tests.ranks import run_ranks

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]
MATCHES = {"body.*": NAMES[:4], "body.1.*": NAMES[2:4], "*.bias": NAMES[1::2], "head.weight": NAMES[4:5], "*": NAMES}


def make(frozen=()):
    model = nn.Module()
    model.body, model.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def stage_at(step, match):
    return Stage(step=step, match=match)


def unfreezing_of(model, stages):
    return Unfreezing(model, stages, steps_per_epoch=1)


def config_of(unfreeze):
    return TrainConfig(epochs=1, unfreeze=unfreeze).unfreeze


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def expected(stages, step, frozen=()):
    """By the words of the class: the earliest stage that names it, else as the model made it."""
    found = []
    for name in NAMES:
        since = [at for at, patterns in stages if any(name in MATCHES[pattern] for pattern in patterns)]
        if (step >= min(since)) if since else (name not in frozen):
            found.append(name)
    return found


def test_every_pair_of_stages_at_every_step():
    for (first, second), (one, other), frozen in itertools.product(
        itertools.product(MATCHES, repeat=2), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)], [(), NAMES, NAMES[3:5]]
    ):
        stages = [(one, [first]), (other, [second])]
        model = make(frozen)
        unfreezing = unfreezing_of(model, [stage_at(*one) for one in stages])
        assert trainable(model) == [name for name in NAMES if name not in frozen]  # making it changes nothing
        before = trainable(model)
        for step in range(5):
            unfreezing.apply(step)
            now = trainable(model)
            assert now == expected(stages, step, frozen)
            assert step in unfreezing.steps or step == 0 or now == before
            before = now


STAGES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.sampled_from(sorted(MATCHES)), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(
    STAGES,
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.sets(st.sampled_from(NAMES)),
    st.randoms(use_true_random=False),
)
def test_only_the_last_step_counts_and_the_order_of_stages_does_not(stages, steps, frozen, chance):
    model = make(frozen)
    unfreezing = unfreezing_of(model, [stage_at(*one) for one in stages])
    for step in steps:  # forth and back, and twice the same
        unfreezing.apply(step)
        assert trainable(model) == expected(stages, step, frozen)
    mixed = list(stages)
    chance.shuffle(mixed)
    fresh = make(frozen)
    resumed = unfreezing_of(fresh, [stage_at(*one) for one in mixed])
    resumed.apply(steps[-1])  # a process that begins inside a phase
    assert trainable(fresh) == trainable(model)
    assert resumed.steps == unfreezing.steps


def test_steps_are_those_at_which_something_changes():
    def steps_of(*stages):
        return unfreezing_of(make(), [stage_at(*one) for one in stages]).steps

    assert steps_of((5, ["head.*"]), (2, ["body.*"])) == {2, 5}
    assert steps_of((5, ["head.*"]), (2, ["*"])) == {2}  # nothing is left for step 5
    assert Unfreezing(make(), [Stage(match=["*"], epoch=0.5)], 5).steps == {3}
    assert unfreezing_of(make(), []).steps == frozenset()


def test_between_stages_nothing_changes():
    model = make()
    unfreezing = unfreezing_of(model, [stage_at(3, ["body.1.*"]), stage_at(6, ["body.*"])])
    seen = []
    for step in range(8):
        unfreezing.apply(step)
        seen.append(len(trainable(model)))
    assert seen == [2, 2, 2, 4, 4, 4, 6, 6]


def test_a_tied_parameter_goes_by_all_its_names():
    for name in ("body.0.weight", "head.weight", "head.*"):
        model = make()
        model.head.weight = model.body[0].weight
        unfreezing = unfreezing_of(model, [stage_at(3, [name])])
        for step in (2, 3):
            unfreezing.apply(step)
            assert model.body[0].weight.requires_grad == (step == 3), (name, step)
        assert any(one is model.head.weight for one in unfreezing.begin(3)[1]), name
        with pytest.raises(UsageError, match="trains from step 3 on, and the task needs head"):
            unfreezing.check_frozen({"head.weight": 4})


class Deep(nn.Module):
    """An embedding, three blocks and a norm in a body, and a head of two layers outside of it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.embedding = nn.Linear(2, 2)
        self.body.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.body.norm = nn.LayerNorm(2)
        self.middle, self.top = nn.Linear(2, 2), nn.Linear(2, 1)


HEAD = ["middle.weight", "middle.bias", "top.weight", "top.bias"]
NORM = ["body.norm.weight", "body.norm.bias"]
ENDS = {
    "head": HEAD,
    "last 1": ["body.blocks.2.weight", *NORM, *HEAD],
    "last 3": ["body.blocks.0.weight", "body.blocks.1.weight", "body.blocks.2.weight", *NORM, *HEAD],
    "all": [name for name, _ in Deep().named_parameters()],
}


@pytest.mark.parametrize("word", ENDS)
def test_words_name_the_end_of_a_model_of_any_depth(word):
    model = Deep()
    unfreezing = Unfreezing(model, [Stage(match=[word], epoch=2)], 1, [*find_blocks(model)])
    unfreezing.apply(1)
    assert trainable(model) == [name for name in ENDS["all"] if name not in ENDS[word]]
    unfreezing.apply(2)
    assert trainable(model) == ENDS["all"]


def test_short_form_is_a_stage_for_each_epoch():
    short = config_of({0: "head", 1: "last 1", 2.5: ["body.*", "top.*"], 3: "all"})
    assert [(stage.epoch, stage.match) for stage in short] == [
        (0, ["head"]),
        (1, ["last 1"]),
        (2.5, ["body.*", "top.*"]),
        (3, ["all"]),
    ]
    model = Deep()
    unfreezing = Unfreezing(model, short, 10, [*find_blocks(model)])
    assert unfreezing.steps == {0, 10, 25}
    for step, expected in ((0, HEAD), (10, ENDS["last 1"]), (25, ENDS["all"])):
        unfreezing.apply(step)
        assert trainable(model) == expected


def test_words_that_no_part_of_the_model_answers_are_named():
    blocks = [*find_blocks(Deep())]
    for word, model, found in (
        ("last 4", Deep(), "the model has 3 repeated blocks, so there is no 'last 4'"),
        ("last 0", Deep(), "no parameter matches ['last 0']"),
        ("lasts 2", Deep(), "no parameter matches ['lasts 2']"),
        ("head", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no parameter matches ['head']"),
        ("head", nn.Linear(2, 2), "the model has 0 repeated blocks, so there is no 'head'"),
    ):
        names = blocks if isinstance(model, Deep) else [*find_blocks(model)]
        with pytest.raises(UsageError, match=re.escape(found)):
            Unfreezing(model, [Stage(match=[word], epoch=1)], 1, names)


def test_parameters_stay_the_objects_that_they_are():
    model = make()
    before = list(model.parameters())
    unfreezing = unfreezing_of(model, [stage_at(3, ["*"])])
    for step in random.Random(0).choices(range(6), k=4):
        unfreezing.apply(step)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("match", [["blocks"], ["Head.*"], ["calls"]], ids=str)
def test_a_stage_that_names_no_parameter_is_an_error_that_names_some(match):
    with pytest.raises(UsageError, match=r"no parameter matches[\s\S]*scale, inner\.weight, inner\.bias") as caught:
        unfreezing_of(own_tasks.DeepModel(2, 0.0), [stage_at(1, ["blocks.*"]), stage_at(3, match)])
    assert caught.value.where == "train.unfreeze"
    assert str(match) in str(caught.value)


def test_each_pattern_of_a_stage_must_match():
    with pytest.raises(UsageError, match=r"no parameter matches \['bodies\.\*', 'haed'\]") as caught:
        unfreezing_of(make(), [stage_at(1, ["body.*", "bodies.*", "head.*", "haed"])])
    assert caught.value.where == "train.unfreeze"


@pytest.mark.parametrize(
    ("stages", "frozen", "until", "wrong"),
    [
        ([stage_at(4, ["body.*"])], (), {"body.*": 4}, None),
        ([stage_at(4, ["body.1.*"]), stage_at(6, ["*"])], (), {"body.*": 4}, None),
        (
            [stage_at(4, ["body.*"])],
            (),
            {"body.*": 5},
            r"body\.0\.weight trains from step 4 on.*body\.\*.*until step 5",
        ),
        (
            [stage_at(3, ["*.1.bias"]), stage_at(6, ["body.*"])],
            (),
            {"body.*": 4},
            r"body\.1\.bias trains from step 3 on",
        ),
        ([stage_at(4, ["body.0.*"])], (), {"body.*": 4}, r"body\.1\.weight trains from step 0 on"),
        ([], (), {"body.*": 1}, r"body\.0\.weight trains from step 0 on"),
        ([], NAMES[:4], {"body.*": 9}, None),  # the model itself froze them
        ([], (), {}, None),
    ],
)
def test_what_a_task_needs_frozen_must_stay_frozen(stages, frozen, until, wrong):
    unfreezing = unfreezing_of(make(frozen), stages)
    if wrong is None:
        unfreezing.check_frozen(until)
        return
    with pytest.raises(UsageError, match=wrong) as caught:
        unfreezing.check_frozen(until)
    assert caught.value.where == "train.unfreeze"


# ---- parameters that code of the task freezes or unfreezes by itself


class Switching(own_tasks.Deep):
    """From its third batch on, `requires_grad` of some parameters is another: set by the loss, or inside a block."""

    def __init__(self, name, trains, inside=False):
        super().__init__(frozen=() if not trains else (name,))
        self.name, self.trains, self.inside, self.calls = name, trains, inside, 0

    def model(self):
        model = super().model()
        owner, _, last = self.name.rpartition(".")
        if self.inside:
            forward = model.get_submodule(owner).forward

            def switched(*arguments):
                if self.calls > 2:
                    getattr(model.get_submodule(owner), last).requires_grad_(self.trains)
                return forward(*arguments)

            model.get_submodule(owner).forward = switched
        return model

    def loss(self, model, batch):
        self.calls += 1
        if self.calls > 2 and not self.inside:
            model.get_parameter(self.name).requires_grad_(self.trains)
        return super().loss(model, batch)


def errors_of_switching(strategy, cases):
    found = []
    for name, trains, inside in cases:
        with pytest.raises(LockstepError) as error:
            runs.fit(Switching(name, trains, inside), runs.config(parallel={"strategy": strategy}))
        found.append(str(error.value))
    return found


@pytest.mark.cases("2-fsdp")
@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_parameter_that_a_forward_pass_freezes_or_unfreezes_is_named(world, strategy):
    """Ranks would drift apart, and clipping would leave it out."""
    up, head = "blocks.1.up.weight", "head.weight"
    cases = [(up, True, False), (head, False, False), (up, True, True)]
    for unfrozen, frozen, in_a_block in run_ranks(world, errors_of_switching, strategy, cases):
        for text in (unfrozen, in_a_block):
            assert "step 3, Task.loss or the model: a forward pass has changed which parameters train" in text
            assert f"(requires_grad): unfrozen were {up}\n" in text
        assert f"(requires_grad): frozen were {head}\n" in frozen
        assert "remedy: let train.unfreeze say" in unfrozen


def test_parameters_that_are_frozen_within_a_loss_alone_train_as_in_plain_torch():
    task = Toggling()
    weights, _ = runs.fit(task, runs.config())
    plain, _ = runs.by_hand(Toggling())
    assert runs.difference(weights, plain) < 1e-10


class Toggling(own_tasks.Plain):
    """A part of the loss gives no gradient to the last layer, as adversarial training does."""

    def loss(self, model, batch):
        model[2].requires_grad_(False)
        first = model(batch[0]).square().mean(dim=1).sum()
        model[2].requires_grad_(True)
        return super().loss(model, batch) + 0.1 * first
