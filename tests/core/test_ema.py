"""The average of weights, against torch's AveragedModel."""

import copy
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.core.ema import Ema, decay_at
from tests.selection import mainly


class Tied(nn.Module):
    """A frozen layer, an embedding that is the output layer too, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embedding(tokens))))


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return Tied().to(dtype)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)  # float16 has no 1e-8


def one_update(model, optimizer, number):
    tokens = torch.randint(7, (6,), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
    optimizer.step()


def after(updates, dtype=torch.float32, decay=0.9):
    model = make_model(dtype)
    optimizer, ema = make_optimizer(model), Ema(model, decay)
    for number in range(updates):
        one_update(model, optimizer, number)
        ema.update(number + 1)
    return model, optimizer, ema


def ramp(decay):
    """What AveragedModel calls. It counts from the second update on, because its first update only copies."""

    def add(averages, current, count):
        get_ema_multi_avg_fn(min(decay, (1 + int(count)) / (10 + int(count))))(averages, current, count)

    return add


def values(tensors):
    """Copies, as bits: also those of a NaN can be compared."""
    return {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in dict(tensors).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the average


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", mainly([0.0, 0.9], [0.0, 0.3, 0.9, 0.9999, 1.0]))
def test_averages_are_torchs_own_to_the_last_bit(dtype, decay):
    model = make_model(dtype)
    optimizer, ema = make_optimizer(model), Ema(model, decay)
    reference = AveragedModel(model, multi_avg_fn=ramp(decay))
    reference.update_parameters(model)  # its first update only copies, as Ema does when it is made
    seen = [values(ema.tensors)]
    for number in range(20):
        one_update(model, optimizer, number)
        ema.update(number + 1)
        reference.update_parameters(model)
        assert same(values(ema.tensors), values(reference.module.named_parameters()))
        seen.append(values(ema.tensors))
    assert not any(same(a, b) for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("decay", [0.5, 0.995, 0.99999])
def test_the_weights_at_the_start_lose_their_share_in_short_trainings_and_late_ones_have_the_given_decay(decay):
    start = nn.Linear(1, 1, bias=False)
    nn.init.ones_(start.weight)
    ema = Ema(start, decay)
    with torch.no_grad():
        start.weight.zero_()  # so that the average is the share of the first weights
    shares = []
    for number in range(1, 121):
        ema.update(number)
        shares.append(ema.tensors["weight"].item())
    assert shares[19] < 1e-6
    exact = math.factorial(10) / math.prod(range(11, 20))  # the docstring's product for 9 updates
    assert shares[8] == pytest.approx(exact, rel=1e-5) or decay == 0.5
    assert [decay_at(number, decay) for number in (1, 10**9)] == [2 / 11, decay]


class SeveralKinds(nn.Module):
    """Layers of two dtypes that train, and frozen parameters that forward moves: fractions, infinite ones, integers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1).double()
        self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf, 0.0]), requires_grad=False)
        self.codes = nn.Parameter(torch.tensor([7, 11, 13]), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def moved(self):
        with torch.no_grad():
            for parameter in (*self.body.parameters(), *self.head.parameters(), self.teacher):
                parameter.add_(torch.randn(parameter.shape))
            self.mask.copy_(self.mask.roll(1))
            self.codes.add_(2)
            self.flags.logical_not_()


FROZEN = ("teacher", "mask", "codes", "flags")


def test_only_what_trains_and_has_fractions_is_averaged_and_the_rest_is_copied():
    """torch's AveragedModel averages all: it makes 6, 10, 12 of indices 7, 11, 13."""
    model = SeveralKinds()
    model.body.bias.requires_grad_(False)
    ema = Ema(model, 0.7)
    for number in range(1, 5):
        model.moved()
        if number == 3:  # it begins to train, with the average of a constant: the weights before
            before = model.body.bias.detach().clone()
            ema.update(number)
            assert torch.equal(ema.tensors["body.bias"], before)
            model.body.bias.requires_grad_()
            continue
        ema.update(number)
        for name in FROZEN:
            assert torch.equal(ema.tensors[name], model.get_parameter(name)), name
    expected = before + (model.body.bias - before) * (1 - decay_at(4, 0.7))
    assert torch.allclose(ema.tensors["body.bias"], expected)
    assert not torch.equal(ema.tensors["body.weight"], model.body.weight)
    raw = values(model.named_parameters())
    with ema.applied():
        assert all(torch.equal(ema.tensors[name], model.get_parameter(name)) for name in FROZEN)
    assert same(values(model.named_parameters()), raw)


def test_averages_of_a_model_of_several_dtypes_are_torchs_own():
    model = make_model()
    model.head = nn.Linear(5, 7).double()
    model.frozen.requires_grad_()
    ema, reference = Ema(model, 0.7), AveragedModel(model, multi_avg_fn=ramp(0.7))
    reference.update_parameters(model)
    for number in range(1, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_((torch.randn(parameter.shape) * 9).to(parameter.dtype))
        ema.update(number)
        reference.update_parameters(model)
    assert same(values(ema.tensors), values(reference.module.named_parameters()))
    assert {tensor.dtype for tensor in ema.tensors.values()} == {torch.float32, torch.float64}


def test_all_parameters_have_an_average_tied_ones_once_buffers_none():
    model = make_model()
    ema = Ema(model, 0.9)
    assert list(ema.tensors) == [name for name, _ in model.named_parameters()]
    assert "frozen.weight" in ema.tensors
    assert "head.weight" not in ema.tensors
    assert "norm.running_mean" not in ema.tensors
    assert same(values(ema.tensors), values(model.named_parameters()))


def test_averages_are_tensors_of_their_own_without_gradient():
    model, _, ema = after(2)
    raw = values(model.named_parameters())
    for name, tensor in ema.tensors.items():
        assert type(tensor) is torch.Tensor, name
        assert not tensor.requires_grad
        tensor.add_(1)
    assert same(values(model.named_parameters()), raw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_narrow_parameters_are_in_float32(dtype):
    model = make_model(dtype).requires_grad_()
    ema = Ema(model, 0.999)
    wide = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for number in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        ema.update(number + 1)
        current = [parameter.detach().float() for parameter in model.parameters()]
        get_ema_multi_avg_fn((2 + number) / (11 + number))(list(wide.values()), current, None)
    assert {tensor.dtype for tensor in ema.tensors.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert same(values(ema.tensors), values(wide))
    assert any(not torch.equal(tensor.to(dtype).float(), tensor) for tensor in ema.tensors.values())


def test_averages_that_were_loaded_are_gone_on_with():
    model, optimizer, ema = after(3)
    resumed = Ema(model, 0.9)
    for name, tensor in ema.tensors.items():
        resumed.tensors[name] = tensor.clone()  # as from a checkpoint
    one_update(model, optimizer, 3)
    ema.update(4)
    resumed.update(4)
    assert same(values(resumed.tensors), values(ema.tensors))


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_outside_0_and_1_is_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        Ema(make_model(), decay)


def test_a_model_without_parameters_has_no_averages():
    ema = Ema(nn.ReLU(), 0.9)
    ema.update(1)
    with ema.applied():
        assert ema.tensors == {}


# ---- applied


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_inside_the_model_computes_with_the_averages_and_afterwards_with_its_own(dtype):
    model, _, ema = after(5, dtype)
    raw, averages = values(model.named_parameters()), values(ema.tensors)
    reference = copy.deepcopy(model)
    for name, parameter in reference.named_parameters():
        parameter.data = ema.tensors[name].to(dtype, copy=True)
    tokens = torch.arange(7)
    before = model.eval()(tokens)
    with ema.applied():
        assert same(values(model.named_parameters()), values(reference.named_parameters()))
        assert torch.equal(model(tokens), reference.eval()(tokens))
        assert not torch.equal(model(tokens), before)
    assert same(values(model.named_parameters()), raw)
    assert same(values(ema.tensors), averages)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_exception_inside_both_are_back(dtype, kind):
    model, _, ema = after(3, dtype)
    raw, averages = values(model.named_parameters()), values(ema.tensors)

    def evaluate():
        with ema.applied():
            assert not same(values(model.named_parameters()), raw)
            raise kind

    for _ in range(2):  # and it can be entered again
        with pytest.raises(kind):
            evaluate()
        assert same(values(model.named_parameters()), raw)
        assert same(values(ema.tensors), averages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_when_memory_runs_out_on_the_way_in_both_are_back(dtype, monkeypatch):
    model, _, ema = after(3, dtype)
    raw, averages = values(model.named_parameters()), values(ema.tensors)
    clone, calls = nn.Parameter.clone, []

    def clone_twice(self):
        calls.append(self)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return clone(self)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Parameter, "clone", clone_twice, raising=False)
        with pytest.raises(torch.OutOfMemoryError), ema.applied():
            pytest.fail("entered")
    assert same(values(model.named_parameters()), raw)
    assert same(values(ema.tensors), averages)
    ema.update(4)  # it knows that it is outside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_itself_it_changes_nothing(dtype):
    model, _, ema = after(3, dtype)
    raw, averages = values(model.named_parameters()), values(ema.tensors)
    with ema.applied():
        inside = values(model.named_parameters())
        with ema.applied():
            assert same(values(model.named_parameters()), inside)
        assert same(values(model.named_parameters()), inside)
        with pytest.raises(RuntimeError, match=r"Ema\.update inside"):
            ema.update(4)
    assert same(values(model.named_parameters()), raw)
    assert same(values(ema.tensors), averages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_and_zeros_with_a_sign_come_back_as_they_were(dtype):
    model = make_model(dtype)
    with torch.no_grad():
        model.frozen.bias.copy_(torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]))
    ema = Ema(model, 0.9)
    raw, averages = values(model.named_parameters()), values(ema.tensors)
    with ema.applied():
        pass
    assert same(values(model.named_parameters()), raw)
    assert same(values(ema.tensors), averages)


def test_parameters_that_are_views_of_one_storage_come_back():
    model = nn.ParameterDict({"flat": nn.Parameter(torch.arange(6.0))})
    model["view"] = nn.Parameter(model["flat"].data[:4])
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model["flat"].add_(1)
    ema.update(10**6)
    raw, averages = values(model.named_parameters()), values(ema.tensors)
    with ema.applied():
        assert torch.equal(model["flat"].detach(), torch.arange(6.0) + 0.5)
    assert same(values(model.named_parameters()), raw)
    assert same(values(ema.tensors), averages)


def test_parameters_stay_the_same_objects_with_the_same_storage_and_flags():
    model, _, ema = after(2)

    def identity():
        return [(id(p), p.data_ptr(), p.requires_grad, id(p.grad), p.is_leaf) for p in model.parameters()]

    before, averages = identity(), [tensor.data_ptr() for tensor in ema.tensors.values()]
    with ema.applied():
        assert identity() == before
    assert identity() == before
    assert [tensor.data_ptr() for tensor in ema.tensors.values()] == averages
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grad_mode_around_it_holds_inside_and_training_goes_on(mode, dtype):
    model, optimizer, ema = after(3, dtype)
    raw = values(model.named_parameters())
    with mode(), ema.applied():
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
        model.eval()(torch.arange(7))
    assert same(values(model.named_parameters()), raw)
    model.train()
    one_update(model, optimizer, 3)
    ema.update(4)
    assert not same(values(model.named_parameters()), raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_evaluations_is_training_without(dtype):
    def train(evaluates):
        model = make_model(dtype)
        optimizer, ema = make_optimizer(model), Ema(model, 0.9)
        for number in range(10):
            one_update(model, optimizer, number)
            ema.update(number + 1)
            if evaluates and number % 3 == 2:
                with torch.no_grad(), ema.applied():
                    model.eval()(torch.arange(7))
                model.train()
        slots = {
            f"{number}.{key}": value
            for number, slots in optimizer.state_dict()["state"].items()
            for key, value in slots.items()
        }
        return values(model.state_dict()), values(ema.tensors), values(slots)

    for one, other in zip(train(True), train(False), strict=True):
        assert same(one, other)


def test_at_most_one_temporary_exists(monkeypatch):
    model = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(5)])
    ema = Ema(model, 0.9)
    clone, made = nn.Parameter.clone, []

    def watched_clone(self):
        assert not any(temporary() is not None for temporary in made)
        temporary = clone(self)
        made.append(weakref.ref(temporary))
        return temporary

    monkeypatch.setattr(nn.Parameter, "clone", watched_clone, raising=False)
    with ema.applied():
        pass
    assert len(made) == 10
    assert not any(temporary() is not None for temporary in made)
