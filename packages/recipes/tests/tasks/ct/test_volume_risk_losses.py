"""The losses of yes/no questions against plain formulas, and the units that they sum over."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct import losses
from lockstep_recipes.tasks.ct.heads import check_outcomes, make_head

NAN = math.nan
LABELS = torch.tensor([[1, 0, NAN], [NAN, NAN, NAN], [0, 0, 0], [NAN, 1, NAN], [1, 1, 1]], dtype=torch.float32)


def logits_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["question", "patient"])
def test_the_answer_loss_is_the_plain_cross_entropy_of_the_known_labels(reduction, weighted):
    logits = logits_of(LABELS.shape)
    weight = torch.tensor([3.0, 0.5, 2.0], dtype=torch.float64) if weighted else None
    expected = torch.zeros((), dtype=torch.float64)
    units = 0
    for row, answers in enumerate(LABELS):
        known = [number for number, answer in enumerate(answers) if not math.isnan(answer)]
        terms = [
            functional.binary_cross_entropy_with_logits(
                logits[row, number], answers[number].double(), pos_weight=None if weight is None else weight[number]
            )
            for number in known
        ]
        if reduction == "question":
            expected, units = expected + sum(terms), units + len(terms)
        elif terms:
            expected, units = expected + sum(terms) / len(terms), units + 1
    loss = losses.answer_loss(logits, LABELS, reduction=reduction, positive_weight=weight)
    assert torch.allclose(loss, expected, rtol=1e-14)
    assert losses.answer_units(LABELS, reduction) == units
    mine, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, expected))
    assert torch.allclose(mine, theirs, rtol=1e-12)
    assert not mine[LABELS.isnan()].any()


@pytest.mark.parametrize("reduction", ["question", "patient"])
def test_losses_and_units_of_parts_add_up(reduction):
    logits, outcomes = logits_of(LABELS.shape).detach().sort(dim=1).values, [[0, 1], [2]]
    parts = [slice(0, 1), slice(1, 2), slice(2, 5)]
    labels = LABELS.clone()
    labels[0, :2] = torch.tensor([0, 1])
    for loss, units in (
        (losses.answer_loss, losses.answer_units),
        (
            lambda x, y, reduction: losses.survival_loss(x, y, outcomes, reduction=reduction),
            lambda y, reduction: losses.survival_units(y, outcomes, reduction),
        ),
    ):
        whole = loss(logits, labels, reduction=reduction)
        assert torch.allclose(whole, sum(loss(logits[p], labels[p], reduction=reduction) for p in parts), rtol=1e-14)
        assert units(labels, reduction) == sum(units(labels[p], reduction) for p in parts)


def test_a_batch_without_known_labels_has_no_units_and_a_gradient_of_zeros():
    logits, labels = logits_of((2, 3)), torch.full((2, 3), NAN)
    for loss, units in (
        (losses.answer_loss(logits, labels, reduction="patient"), losses.answer_units(labels, "patient")),
        (
            losses.survival_loss(logits, labels, [[0, 1, 2]], reduction="patient"),
            losses.survival_units(labels, [[0, 1, 2]], "patient"),
        ),
    ):
        assert units == 0
        assert loss == 0
        assert not torch.autograd.grad(loss, logits)[0].any()


def test_an_infinite_logit_of_an_unknown_label_does_no_harm():
    logits = torch.tensor([[math.inf, 0.0]], requires_grad=True)
    loss = losses.answer_loss(logits, torch.tensor([[NAN, 1.0]]), reduction="question")
    assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()
    assert torch.isfinite(loss)


def test_positive_weights_are_negatives_over_positives_of_the_known_labels():
    labels = torch.tensor([[1, 0, 1, NAN], [0, 0, 1, NAN], [0, NAN, NAN, NAN], [0, 1, 1, NAN]])
    assert losses.positive_weights(labels).tolist() == [3, 2, 1, 1]


# ---- survival


def survival_of(hazards):
    """S(0), S(1), ... by the definition."""
    survival = [torch.ones((), dtype=torch.float64)]
    for hazard in hazards:
        survival.append(survival[-1] * (1 - hazard))
    return survival


POSSIBLE = [
    answers
    for answers in itertools.product([0.0, 1.0, NAN], repeat=3)
    if not any(answer == 1 and 0 in answers[place:] for place, answer in enumerate(answers))
]


@pytest.mark.parametrize("answers", POSSIBLE)
def test_the_survival_loss_is_the_likelihood_of_the_interval(answers):
    head = make_head("hazard", 4, 3).double()
    vectors = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    survival = survival_of(head.linear(vectors).sigmoid()[0])
    risks = head(vectors).sigmoid()[0]
    assert torch.allclose(risks, 1 - torch.stack(survival[1:]), rtol=1e-12)
    last_no = max((place + 1 for place, answer in enumerate(answers) if answer == 0), default=0)
    first_yes = min((place + 1 for place, answer in enumerate(answers) if answer == 1), default=None)
    likelihood = survival[last_no] - (0 if first_yes is None else survival[first_yes])
    labels = torch.tensor([answers])
    loss = losses.survival_loss(head(vectors), labels, [[0, 1, 2]], reduction="question")
    assert torch.allclose(loss, -likelihood.log() if not labels.isnan().all() else torch.zeros(()).double(), rtol=1e-9)
    gradient = torch.autograd.grad(loss, head.linear.weight)[0]
    assert torch.isfinite(gradient).all()


def test_a_complete_row_has_the_cross_entropies_of_its_hazards():
    """Singer and Willett 1993: the likelihood of discrete times is that of a binary variable per interval at risk."""
    head = make_head("hazard", 4, 3).double()
    vectors = torch.randn(1, 4, dtype=torch.float64)
    raw = head.linear(vectors)
    loss = losses.survival_loss(head(vectors), torch.tensor([[0.0, 1.0, 1.0]]), [[0, 1, 2]], reduction="patient")
    binary = functional.binary_cross_entropy_with_logits(raw[0, :2], torch.tensor([0.0, 1.0]).double(), reduction="sum")
    assert torch.allclose(loss, binary, rtol=1e-10)


@pytest.mark.parametrize("kind", ["monotone", "hazard"])
def test_risks_do_not_fall_with_the_horizon(kind):
    head = make_head(kind, 4, 5, [[3, 0, 4], [2, 1]])
    vectors = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 5
    logits = head(vectors)
    for first, second in ((3, 0), (0, 4), (2, 1)):
        assert (logits[:, first] <= logits[:, second]).all()
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_small_and_large_hazards_have_finite_losses_and_gradients_in_float32(scale):
    head = make_head("hazard", 4, 3)
    with torch.no_grad():
        head.linear.weight.mul_(scale)
        head.linear.bias.fill_(-12)
    vectors = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0.0, 1.0, NAN], [1.0, 1.0, 1.0], [NAN, NAN, 0.0], [NAN, NAN, 1.0]]).repeat(10, 1)
    loss = losses.survival_loss(head(vectors), labels, [[0, 1, 2]], reduction="question")
    assert torch.isfinite(loss)
    loss.backward()
    assert torch.isfinite(head.linear.weight.grad).all()


@pytest.mark.parametrize("outcomes", [[[0, 1]], [[0, 1, 2], [2]], [[0, 1, 3]]])
def test_outcomes_name_each_question_once(outcomes):
    with pytest.raises(UsageError, match=r"name each of the 3 questions once"):
        check_outcomes(outcomes, 3)
