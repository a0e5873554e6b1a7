"""The pure functions of the watch: who differs, what rounding explains, what is usual, what an exchange must give."""

import dataclasses
import random

import pytest
import torch
from torch import nn

from lockstep.launch.device_check.run import wrong_answers
from lockstep.watch import exchange, operations
from lockstep.watch import signed_sums as module
from lockstep.watch.gradients import Detail
from lockstep.watch.history import FigureHistory
from lockstep.watch.part import Due, other_rank
from lockstep.watch.replicas import differing_replicas
from lockstep.watch.signed_sums import SIGNS, signed_sums
from lockstep.watch.verdict import Noise, Verdict, blamed_on_parts, first_difference, same_bits, who
from tests.launch.device_check import faulty
from tests.selection import mainly


def found(number):
    return Detail({"loss": float(number)}, {"w": (number, 0)}, {}, {}, folded=(number,))


A, B, C = found(1), found(2), found(3)


@pytest.mark.parametrize(
    ("pairs", "repeats", "how", "ranks"),
    [
        ([(0, A), (1, B)], [(A, A), (B, B), (A, A)], "repeats", (1,)),
        ([(0, A), (1, B)], [(A, A), (A, A), (A, A)], "once", (1,)),
        ([(0, A), (1, B)], [(A, A), (B, B)], "tie", (0, 1)),
        ([(0, A), (1, B)], [(A, A), (A, A)], "once", (1,)),
        ([(0, A), (1, B)], [(A, B), (A, C), (B, A)], "unstable", (0, 1, 2)),
        ([(0, A), (1, B)], [(A, A), (B, C), (A, A)], "unstable", (1,)),
        ([(0, A), (1, B)], [(A, A), (B, C)], "unstable", (1,)),
        ([(0, A), (0, B)], [(A, A)], "once", (0,)),
        ([(0, A), (1, A)], [(A, A), (A, A)], "nobody", ()),
        ([(0, A), (1, C)], [(A, A), (B, B), (C, C)], "tie", (0, 1, 2)),
    ],
)
def test_who_differs(pairs, repeats, how, ranks):
    finding = who(pairs, repeats, same_bits)
    assert (finding.how, finding.ranks) == (how, ranks)


def test_the_first_difference_is_a_loss_or_the_first_gradient():
    one = Detail({"loss": 1.0}, {"a": (1, 1), "b": (1, 1)}, {}, {}, ())
    assert first_difference(one, one) == ""
    assert first_difference(one, dataclasses.replace(one, losses={"loss": 2.0})) == "the loss"
    other = dataclasses.replace(one, gradients={"a": (1, 1), "b": (1, 2)})
    assert first_difference(one, other) == "the gradient of b"


def detail(gradient, loss=1.0):
    sums = signed_sums(gradient).tolist()
    return Detail({"loss": loss}, {}, {"w": sums}, {"w": torch.finfo(gradient.dtype).eps}, ())


def test_rounding_is_no_difference_and_a_flipped_bit_beyond_it_is_one():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000, generator=generator)

    def again(size=1e-6):
        return exact * (1 + size * torch.randn(1000, generator=generator))

    noise = Noise()
    noise.add(detail(again()), detail(again()))
    for _ in range(300):
        assert noise.same(detail(again()), detail(again()))
    wrong = again()
    wrong[17] *= 1.5
    assert noise.beyond(detail(wrong), detail(again())) == "the gradient of w"
    assert noise.beyond(detail(again(), loss=1.01), detail(again())) == "the loss loss"
    assert noise.beyond(detail(exact * float("nan")), detail(exact))


# ---- signed sums


def test_signed_sums_are_linear_and_know_their_places(monkeypatch):
    monkeypatch.setattr(module, "piece_length", lambda device: 64)
    module._signs.cache_clear()
    values = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = signed_sums(values)
    parts = signed_sums(values[:100]) + signed_sums(values[100:], 100)
    assert torch.allclose(whole, parts, rtol=1e-12)
    assert float(whole[SIGNS]) == pytest.approx(float(values.square().sum()))
    signs = torch.stack([signed_sums(torch.ones(1), place)[:SIGNS] for place in range(300)]).double()
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert torch.allclose(signs.T @ values, whole[:SIGNS])
    module._signs.cache_clear()


# ---- the exchange


def rows_of(gradients, factor=1.0, wrong=None):
    """What ranks give and get, for parameters by name."""
    names, rows = list(gradients[0]), []
    for name in names:
        given = [one[name] for one in gradients]
        reduced = factor * torch.stack(given).mean(0)
        if name == wrong:
            reduced[3] *= 1.5
        mean = sum(signed_sums(one)[:SIGNS] for one in given) / len(given)
        norm = sum(float(one.double().norm()) for one in given) / len(given)
        rows.append([*mean.tolist(), norm, *signed_sums(reduced)[:SIGNS].tolist()])
    return names, rows


@pytest.mark.parametrize("factor", mainly([7.0], [1.0, 0.013, 7.0]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchange_is_right_to_rounding_or_its_parameter_is_named(factor, dtype):
    generator = torch.Generator().manual_seed(3)
    rounding = 16 * torch.finfo(dtype).eps * 3**0.5
    for _ in range(30):
        gradients = [
            {name: torch.randn(size, generator=generator).to(dtype) * scale for name, size, scale in SIZES}
            for _ in range(3)
        ]
        assert exchange._judge(*rows_of(gradients, factor), rounding, FLOORS).name == ""
        if dtype is torch.float32:
            judged = exchange._judge(*rows_of(gradients, factor, wrong="small"), rounding, FLOORS)
            assert judged.name == "small"
            assert judged.factor == pytest.approx(factor, rel=1e-4)


def test_a_gradient_that_was_not_finite_before_the_exchange_says_nothing_about_it():
    """One that was finite before, and is not afterwards, does."""
    generator = torch.Generator().manual_seed(3)
    gradients = [{name: torch.randn(size, generator=generator) for name, size, _ in SIZES} for _ in range(3)]
    gradients[1]["small"][5] = float("nan")
    assert exchange._judge(*rows_of(gradients), 1e-5, FLOORS).name == ""
    names, rows = rows_of([{name: one.nan_to_num() for name, one in of.items()} for of in gradients])
    rows[names.index("middle")][-1] = float("nan")
    assert exchange._judge(names, rows, 1e-5, FLOORS).name == "middle"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_results_that_are_not_finite_on_both_ranks_do_not_differ(value):
    numbers = [value] * SIGNS + [value]
    diverged = Detail({"loss": value}, {}, {"w": numbers}, {"w": 2.0**-23}, folded=())
    fine = Detail({"loss": 1.0}, {}, {"w": [1.0] * (SIGNS + 1)}, {"w": 2.0**-23}, folded=())
    assert Noise().same(diverged, diverged)
    assert not Noise().same(diverged, fine)
    assert not Noise().same(fine, diverged)


SIZES = (("large", 3000, 1.0), ("small", 40, 1e-3), ("middle", 500, 0.1))
FLOORS = [0.0] * len(SIZES)


# ---- history


def test_what_leaves_its_history_is_told_with_its_rank_and_what_was_usual():
    history, numbers = FigureHistory("loss"), random.Random(0)
    for check in range(60):  # a loss that falls, and varies by rank
        usual = [(0.97**check) * (1 + 0.2 * numbers.random()) for _ in range(3)]
        assert history.add(usual) == ""
    text = history.add([usual[0], usual[1] * 30, usual[2]])
    assert text.startswith("the loss of rank 1 is ")
    assert "usually it was" in text
    assert FigureHistory("loss").add([1.0, 1e9]) == ""  # nothing is usual yet
    assert history.add([float("nan"), 0.0, usual[0]]) == ""


# ---- when and whose


def test_each_rank_computes_the_share_of_each_other_in_turn():
    for world in (1, 2, 3, 5):
        seen = {rank: set() for rank in range(world)}
        for check in range(1, 2 * world + 1):
            others = [other_rank(check * 10 - 1, 10, rank, world) for rank in range(world)]
            assert sorted(others) == list(range(world))
            for rank, other in enumerate(others):
                seen[rank].add(other)
        assert all(seen[rank] == (set(range(world)) - {rank} or {0}) for rank in range(world))


def test_a_check_is_due_every_so_many_steps_and_at_the_end_but_in_no_first_step():
    due = Due(every=3, first=2, last=11, left_out=(8,))
    assert [step for step in range(11) if due(step)] == [5, 10]


def test_code_that_may_have_written_weights_comes_before_hardware():
    memory = Verdict("memory", (1,), "in a.weight: the memory or the device of rank 1", "a.weight", guilty=(1,))
    seen = {"Rogue": "a.weight in after_step"}
    for writes, parts, kind, ranks, words in [
        ([{}, {}], (), "memory", (1,), "the device of rank 1"),
        ([{}, seen], ("Rogue",), "code", (1,), "Rogue has written a.weight in after_step, on rank 1 and not on"),
        (
            [seen, seen],
            ("Other", "Rogue"),
            "code",
            (0, 1),
            "Rogue has written a.weight in after_step, on ranks 0 and 1:",
        ),
        ([{}, {}], ("Other",), "unclear", (1,), "the device of rank 1; or code of these Parts"),
    ]:
        found = blamed_on_parts(memory, writes, parts)
        assert (found.kind, found.ranks) == (kind, ranks), writes
        assert words in found.text, writes
        assert (found.guilty == (1,)) == (kind == "memory"), writes
        assert ("the memory" in found.text) == (kind != "code"), writes
    data = Verdict("data", (1,), "different bytes")
    assert blamed_on_parts(data, [{}, seen], ("Rogue",)) is data


def test_replicas_that_differ():
    same, other = (1, 1), (2, 2)
    assert differing_replicas([0, 0, 0], [same, other, same]) == [1]
    assert differing_replicas([0, 0], [same, other]) == [0, 1]
    assert differing_replicas([0, 1, 0, 1], [same, other, same, other]) == []
    assert differing_replicas([0, 1, 0, 1], [same, other, same, same]) == [1, 3]


# ---- devices and operations


def test_a_device_that_lies_gets_known_answers_wrong():
    assert wrong_answers(torch.device("cpu")) == []
    with faulty.Flips("aten.sort"):
        assert wrong_answers(torch.device("cpu")) == ["sort fp32"]


def test_the_first_operation_that_differs_is_named_with_its_line():
    model, calls = nn.Linear(3, 2), []

    def run():
        calls.append(None)
        hidden = model(torch.ones(1, 3))
        hidden = hidden * len(calls)
        hidden.sum().backward()

    name = operations.first_difference(run, run)
    assert name.startswith("mul at test_judging.py:")
    assert operations.first_difference(lambda: torch.ones(2) + 1, lambda: torch.ones(2) + 1) == ""
