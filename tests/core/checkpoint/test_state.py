"""The state of a training is saved and restored by parameter name, bit for bit, and trains on the same."""

import json

import pytest
import torch
from torch import nn

from lockstep.core.checkpoint import files, nested, state
from lockstep.core.errors import CheckpointError
from tests.core.checkpoint import cases

BIASES_AND_WEIGHTS = [[0, 1], [2, 3, 4]]
OTHERWISE = [[4, 2], [3, 0, 1]]  # as if the groups of the config had changed


class Model(nn.Module):
    """Matrices, vectors and a scalar; buffers that a training changes; `frozen` never gets a gradient."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, inputs):
        return self.second(self.norm(self.first(inputs)).tanh()) * self.scale


def make(kind, arguments, groups=BIASES_AND_WEIGHTS, seed=0):
    model = Model(seed)
    parameters = list(model.parameters())
    parts = [[parameters[number] for number in group] for group in groups]
    parts.append([one for one in parameters if not any(one is other for part in parts for other in part)])
    return model, getattr(torch.optim, kind)([{"params": part} for part in parts], **{"lr": 0.01, **arguments})


def train(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        model(torch.randn(16, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def through_files(tensors, plain, folder):
    """Tensors and plain values as a checkpoint gives them back."""
    _, index = files.write_share(folder / "__0_0.distcp", cases.whole(tensors), cases.ignore)
    return files.read(folder, index), json.loads(json.dumps(plain))


def everything(model, optimizer):
    tensors, plain = state.capture(model, optimizer)
    return {name: cases.bits(tensor) for name, tensor in tensors.items()}, plain


OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("Adam", {"foreach": False, "betas": (0.8, 0.9)}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("RAdam", {}),
    ("NAdam", {}),
    ("ASGD", {"t0": 2}),
    ("Adafactor", {}),
]


@pytest.mark.cases("AdamW-amsgrad", "Adam-foreach", "SGD-momentum", "Adafactor", "RMSprop")
@pytest.mark.parametrize(
    ("kind", "arguments"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_a_restored_training_is_the_same_bit_for_bit_and_goes_on_so(tmp_path, kind, arguments):
    model, optimizer = make(kind, arguments)
    train(model, optimizer, 7)
    tensors, plain = state.capture(model, optimizer)
    other, other_optimizer = make(kind, arguments, OTHERWISE, seed=1)
    state.restore(*through_files(tensors, plain, tmp_path), other, other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)
    assert (kind == "SGD" and "momentum" not in arguments) or len(tensors) > len(model.state_dict())
    train(model, optimizer, 5, begin=7)
    train(other, other_optimizer, 5, begin=7)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_muon_too(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False))
        return model, torch.optim.Muon(model.parameters(), lr=0.01)

    (model, optimizer), (other, other_optimizer) = make(0), make(1)
    train(model, optimizer, 3)
    state.restore(*through_files(*state.capture(model, optimizer), tmp_path), other, other_optimizer)
    train(model, optimizer, 2, begin=3)
    train(other, other_optimizer, 2, begin=3)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_without_the_optimizers_state_it_would_not_go_on_so(tmp_path):
    """That the test above can fail."""
    model, optimizer = make("AdamW", {})
    train(model, optimizer, 7)
    other, other_optimizer = make("AdamW", {}, seed=1)
    tensors, plain = state.capture(model, optimizer)
    state.restore(*through_files(tensors, plain, tmp_path), other)  # the model alone
    assert [cases.bits(one) for one in other.state_dict().values()] == [
        cases.bits(one) for one in model.state_dict().values()
    ]
    assert not other_optimizer.state
    train(model, optimizer, 1, begin=7)
    train(other, other_optimizer, 1, begin=7)
    assert not torch.equal(other.first.weight, model.first.weight)


def test_names_are_those_of_parameters():
    model, optimizer = make("AdamW", {})
    train(model, optimizer, 1)
    tensors, plain = state.capture(model, optimizer, {"scale": torch.zeros(())})
    own = {f"model.{name}" for name in model.state_dict()}
    trained = ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight", "scale"]
    slots = {f"optimizer.{name}.{slot}" for name in trained for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == own | slots | {"ema.scale"}
    assert "model.norm.num_batches_tracked" in tensors
    assert plain == {}
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_captured_tensors_are_the_live_ones():
    model, optimizer = make("SGD", {"momentum": 0.9})
    train(model, optimizer, 1)
    tensors, _ = state.capture(model, optimizer)
    assert tensors["model.scale"].data_ptr() == model.scale.data_ptr()
    assert (
        tensors["optimizer.scale.momentum_buffer"].data_ptr()
        == optimizer.state[model.scale]["momentum_buffer"].data_ptr()
    )


def test_before_the_first_step_there_is_no_optimizer_state():
    tensors, plain = state.capture(*make("AdamW", {}))
    assert {name.partition(".")[0] for name in tensors} == {"model"}
    assert plain == {}


def test_parameters_stay_the_objects_that_they_are(tmp_path):
    model, optimizer = make("AdamW", {})
    train(model, optimizer, 1)
    other, other_optimizer = make("AdamW", {}, seed=1)
    before = {name: (id(one), one.data_ptr(), one.requires_grad) for name, one in other.named_parameters()}
    state.restore(*through_files(*state.capture(model, optimizer), tmp_path), other, other_optimizer)
    assert {name: (id(one), one.data_ptr(), one.requires_grad) for name, one in other.named_parameters()} == before


def test_learning_rates_are_no_state(tmp_path):
    model, optimizer = make("AdamW", {})
    train(model, optimizer, 1)
    other, other_optimizer = make("AdamW", {"lr": 0.5, "weight_decay": 0.7})
    state.restore(*through_files(*state.capture(model, optimizer), tmp_path), other, other_optimizer)
    assert {(group["lr"], group["weight_decay"]) for group in other_optimizer.param_groups} == {(0.5, 0.7)}


def test_tied_parameters_stay_tied(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (other, other_optimizer) = make(0), make(1)
    train(model, optimizer, 3)
    state.restore(*through_files(*state.capture(model, optimizer), tmp_path), other, other_optimizer)
    assert other[1].weight is other[0].weight
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_parameter_at_the_top_of_the_model_has_its_state(tmp_path):
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer, other_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    train(model, optimizer, 2)
    state.restore(*through_files(*state.capture(model, optimizer), tmp_path), other, other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_plain_values_of_an_optimizer_come_back():
    model, optimizer = make("SGD", {})
    optimizer.state[model.scale] = {
        "count": 2**53 + 1,
        "rate": 0.1 + 0.2,
        "nothing": None,
        "flag": True,
        "mode": "fast",
    }
    other, other_optimizer = make("SGD", {}, OTHERWISE)
    tensors, plain = state.capture(model, optimizer)
    state.restore(tensors.items(), json.loads(json.dumps(plain)), other, other_optimizer)
    assert other_optimizer.state[other.scale] == optimizer.state[model.scale]
    assert type(other_optimizer.state[other.scale]["flag"]) is bool


def test_averages_come_back_in_place(tmp_path):
    model, optimizer = make("SGD", {})
    averages = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    others = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    places = {name: tensor.data_ptr() for name, tensor in others.items()}
    tensors, plain = state.capture(model, optimizer, averages)
    state.restore(*through_files(tensors, plain, tmp_path), model, optimizer, others)
    assert cases.same(others, averages)
    assert {name: tensor.data_ptr() for name, tensor in others.items()} == places
    state.restore(*through_files(tensors, plain, tmp_path), model, optimizer)  # by a run that keeps none


# ---- what the model itself counts as its state


class Counting(nn.Linear):
    """Its extra state is `value`."""

    def __init__(self, value):
        super().__init__(6, 3)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


@pytest.mark.parametrize("value", [7, 0.1, None, "text", True])
def test_plain_extra_state_comes_back(tmp_path, value):
    model, other = nn.Sequential(Counting(value)), nn.Sequential(Counting("other"))
    optimizer = torch.optim.SGD(model.parameters())
    tensors, plain = state.capture(model, optimizer)
    assert plain == {"model.0._extra_state": value}
    state.restore(*through_files(tensors, plain, tmp_path), other)
    assert (other[0].value, type(other[0].value)) == (value, type(value))
    assert torch.equal(other[0].weight, model[0].weight)


def test_extra_state_from_an_accelerator_comes_to_the_device_of_the_rank():
    """The parameters may be elsewhere: parallel.cpu_offload keeps them in host memory."""
    other = nn.Sequential(Counting("other"))
    plain = {"model.0._extra_state": nested.encode([torch.ones(2), torch.ones(3)])}
    plain["model.0._extra_state"][nested.NESTED][1]["tensor"]["on_host"] = False
    state.restore((), plain, other, device=torch.device("meta"))
    assert [tensor.device.type for tensor in other[0].value] == ["cpu", "meta"]
    state.restore((), plain, other)
    assert [tensor.device.type for tensor in other[0].value] == ["cpu", "cpu"]


def test_extra_state_that_is_a_tensor_comes_back(tmp_path):
    class Tensorial(Counting):
        def get_extra_state(self):
            return torch.tensor(self.value)

        def set_extra_state(self, value):
            self.value = int(value)

    model, other = nn.Sequential(Tensorial(7)), nn.Sequential(Tensorial(0))
    state.restore(*through_files(*state.capture(model, torch.optim.SGD(model.parameters())), tmp_path), other)
    assert other[0].value == 7


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, [1, 2], b"bytes", float("nan"), float("inf"), 1j, object()],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_named(value):
    if isinstance(value, complex) or type(value) is object:  # the others are saved, see test_nested.py
        model = nn.Sequential(Counting(value))
        with pytest.raises(
            CheckpointError, match=f"cannot be saved: it is a builtins.{type(value).__name__}"
        ) as caught:
            state.capture(model, torch.optim.SGD(model.parameters()))
        assert caught.value.where == "model.0._extra_state"
        assert caught.value.remedy
    model, optimizer = make("SGD", {})
    optimizer.state[model.first.weight]["history"] = value
    with pytest.raises(CheckpointError, match="can be saved neither as a tensor nor as a number") as caught:
        state.capture(model, optimizer)
    assert caught.value.where == "optimizer.first.weight.history"


# ---- does it fit


def entry(*shape, dtype="float32"):
    return {"file": "__0_0.distcp", "shape": list(shape), "dtype": dtype}


def index(model):
    return {
        f"model.{name}": entry(*value.shape, dtype=str(value.dtype)[6:]) for name, value in model.state_dict().items()
    }


def test_a_checkpoint_of_the_same_model_fits():
    model = Model()
    state.check_fits(index(model), model)
    slots = {"optimizer.scale.exp_avg": entry(), "ema.scale": entry(), "optimizer.first.weight.row_var": entry(8, 1)}
    state.check_fits(index(model) | slots, model)  # a run without averages reads one with them
    averages = {name: parameter.double() for name, parameter in model.named_parameters()}
    saved = {f"ema.{name}": entry(*average.shape, dtype="float64") for name, average in averages.items()}
    state.check_fits(index(model) | saved, model, averages)


def test_extra_state_is_no_matter_of_shapes():
    state.check_fits({"model.0.weight": entry(3, 6), "model.0.bias": entry(3)}, nn.Sequential(Counting(1)))


def test_what_does_not_fit_is_named():
    model = Model()
    whole = index(model)
    lacking = {name: about for name, about in whole.items() if name != "model.norm.running_var"}
    for saved, message in [
        (
            whole | {"model.first.weight": entry(6, 8)},
            r"tensors differ from the model's \(1\), first model\.first\.weight: saved \(6, 8, .*, model \(8, 6, ",
        ),
        (
            whole | {"model.first.bias": entry(8, dtype="float64")},
            r"first model\.first\.bias: saved .*float64.*, model .*float32",
        ),
        (whole | {"model.head.weight": entry(2, 2)}, r"first model\.head\.weight: saved \(2, 2, .*, model None"),
        (lacking, r"first model\.norm\.running_var: saved None, model \(8, "),
        (lacking | {"model.first.bias": entry(9)}, r"tensors differ from the model's \(2\), first model\.first\.bias"),
        ({}, r"saved None"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            state.check_fits(saved, model)
    with pytest.raises(CheckpointError, match=r"first ema\.scale: saved None, model \("):
        state.check_fits(whole, model, {"scale": model.scale})


def test_optimizer_state_of_an_unknown_parameter_is_named():
    model, optimizer = make("SGD", {})
    for tensors, plain in [
        ({"optimizer.head.weight.step": torch.ones(())}, {}),
        ({}, {"optimizer.head.weight.step": 1}),
    ]:
        with pytest.raises(
            CheckpointError, match=r"optimizer\.head\.weight\.step: the model has no parameter head\.weight"
        ):
            state.restore(tensors.items(), plain, model, optimizer)


# ---- where tensors go; `meta` stands for a device that is not the CPU


def devices(kind, arguments):
    """Devices of all slots after restoring onto parameters that are not on the CPU."""
    model, optimizer = make(kind, {})
    train(model, optimizer, 1)
    tensors, plain = state.capture(model, optimizer)
    other, other_optimizer = make(kind, {})
    optimizer_of_device = type(other_optimizer)(other.to("meta").parameters(), **{"lr": 0.01, **arguments})
    state.restore(tensors.items(), plain, other, optimizer_of_device)
    names = {id(parameter): name for name, parameter in other.named_parameters()}
    return {
        (names[id(parameter)], slot): value.device.type
        for parameter, slots in optimizer_of_device.state.items()
        for slot, value in slots.items()
    }


def test_moments_go_with_their_parameter_and_step_counters_stay_on_the_host():
    found = devices("AdamW", {})
    del found["scale", "step"]
    assert {slot: device for (_, slot), device in found.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.parametrize(
    ("kind", "arguments", "slot", "device"),
    [
        ("Adafactor", {}, ("first.weight", "row_var"), "meta"),
        ("AdamW", {}, ("scale", "step"), "cpu"),
        ("AdamW", {"capturable": True}, ("first.weight", "step"), "meta"),
        ("AdamW", {"fused": True}, ("first.weight", "step"), "meta"),
    ],
    ids=["factors", "step of a scalar", "capturable", "fused"],
)
def test_every_slot_goes_where_torch_keeps_it(kind, arguments, slot, device):
    found = devices(kind, arguments)
    assert found[slot] == device
