"""Repeated blocks: which modules they are. Recomputing or compiling them changes only memory and speed."""

import collections
import copy
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from lockstep.core import devices
from lockstep.core.blocks import _keeps, compile_modules, find_blocks, recompute_activations
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.errors import UsageError
from tests import own_tasks
from tests.ranks import run_on_python_device
from tests.selection import mainly

CPU = torch.device("cpu")


def bag(**modules):
    """A module that holds others, and could be run."""
    holder = nn.Sequential()
    for name, module in modules.items():
        holder.add_module(name, module)
    return holder


def linears(count, size=3):
    return [nn.Linear(size, size) for _ in range(count)]


class Layer(nn.Sequential):
    """For models that name the classes that must not be split."""


class Named(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self._no_split_modules = classes
        self.layers = bag(a=Layer(*linears(2)), b=Layer(nn.Linear(3, 3)), other=nn.Linear(3, 3))
        self.head = nn.Linear(3, 3)


# ---- which they are


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda modules: nn.Sequential(*modules)], ids=["list", "sequential"])
def test_members_of_one_class_are_blocks_in_their_order(kind):
    model = bag(first=nn.Linear(3, 3), layers=kind(linears(12)), head=nn.Linear(3, 3))
    assert list(find_blocks(model)) == [f"layers.{number}" for number in range(12)]
    assert find_blocks(model)["layers.11"] is model.layers[11]


@pytest.mark.parametrize(
    "members",
    [
        linears(1),
        [],
        [nn.Linear(3, 3), nn.Bilinear(3, 3, 3)],
        [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)],
        [nn.Tanh(), nn.Tanh()],
    ],
    ids=["one", "none", "two classes", "with a function between", "without parameters"],
)
def test_other_lists_are_none(members):
    assert find_blocks(bag(layers=nn.ModuleList(members), head=nn.Linear(3, 3))) == {}


def test_single_layers_of_transformers_are_no_blocks():
    """A ResNet names its 53 convolutions, each of which would be gathered and compiled by itself."""
    stages = [bag(first=Layer(nn.Linear(3, 3)), second=Layer(nn.Linear(3, 3))) for _ in range(3)]
    model = bag(stem=Layer(nn.Linear(3, 3)), stages=nn.ModuleList(stages))
    model._no_split_modules = ["Layer"]
    assert list(find_blocks(model)) == [f"stages.{number}" for number in range(3)]
    resnet = transformers.ResNetModel(transformers.ResNetConfig(depths=[1, 2, 2, 1], hidden_sizes=[8, 8, 8, 8]))
    assert list(find_blocks(resnet)) == [f"encoder.stages.{number}" for number in range(4)]


def test_a_sequence_of_one_class_at_the_top_has_blocks_too():
    assert list(find_blocks(nn.Sequential(*linears(3)))) == ["0", "1", "2"]


def test_a_model_without_parameters_has_none():
    assert find_blocks(nn.Tanh()) == {}
    assert find_blocks(nn.Linear(3, 3)) == {}


def test_members_without_parameters_are_left_out():
    class Perhaps(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.inner = nn.Linear(size, size) if size else None

        def forward(self, hidden):
            return self.inner(hidden) if self.inner else hidden

    model = bag(layers=nn.ModuleList([Perhaps(2), Perhaps(0), Perhaps(3)]), head=nn.Linear(1, 1))
    assert list(find_blocks(model)) == ["layers.0", "layers.2"]


def test_of_nested_blocks_only_the_outermost_count():
    layers = nn.ModuleList(nn.Sequential(*linears(3)) for _ in range(11))
    assert list(find_blocks(bag(layers=layers, head=nn.Linear(3, 3)))) == [
        f"layers.{number}" for number in range(11)
    ]  # 1 and 10 share a beginning


def test_several_lists_give_their_blocks_in_the_models_order():
    model = bag(
        encoder=bag(layers=nn.ModuleList(linears(2))),
        decoder=bag(layers=nn.ModuleList(linears(2))),
        pair=nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]),
    )
    assert list(find_blocks(model)) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


@pytest.mark.parametrize("kind", [list, set, tuple])
def test_classes_that_must_not_be_split_are_blocks(kind):
    assert list(find_blocks(Named(kind(["Layer"])))) == ["layers.a", "layers.b"]
    assert list(find_blocks(Named(kind(["Layer", "Linear"])))) == ["layers.a", "layers.b", "layers.other", "head"]
    assert list(find_blocks(bag(inner=Named(kind(["Layer"])), more=nn.ModuleList(linears(2))))) == [
        "inner.layers.a",
        "inner.layers.b",
    ]


@pytest.mark.parametrize("classes", [None, [], ["NoSuchClass"]])
def test_without_such_classes_lists_are_searched(classes):
    assert list(find_blocks(bag(inner=Named(classes), more=nn.ModuleList(linears(2))))) == [
        "inner.layers.a.0",
        "inner.layers.a.1",
        "more.0",
        "more.1",
    ]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks.?"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.1", "head"], ["head", "blocks.1"]),
        (["blocks.1.*"], ["blocks.1.norm", "blocks.1.up", "blocks.1.down"]),
        (["*.up", "blocks.0"], ["blocks.0", "blocks.1.up", "blocks.2.up"]),
        (["inner"], ["inner"]),
        ([], []),
    ],
)
def test_patterns_choose_modules(patterns, expected):
    assert list(find_blocks(own_tasks.DeepModel(3, 0.0), patterns)) == expected


def test_patterns_go_before_all_else():
    assert list(find_blocks(Named(["Layer"]), ["head"])) == ["head"]


@pytest.mark.parametrize("pattern", ["layer.*", "blocks.*.drop", "Blocks.0", ""])
def test_a_pattern_that_matches_nothing_is_an_error_that_names_modules(pattern):
    with pytest.raises(
        UsageError, match=r"matches no module with parameters[\s\S]*use patterns.*inner, head, blocks"
    ) as caught:
        find_blocks(own_tasks.DeepModel(3, 0.0), ["head", pattern])
    assert repr(pattern) in str(caught.value)
    assert caught.value.where == "parallel.shard_modules"


# ---- what is shared must stay whole


def test_a_block_that_shares_a_parameter_with_the_rest_is_none():
    model = bag(layers=nn.ModuleList(linears(3)), head=nn.Linear(3, 3, bias=False))
    model.head.weight = model.layers[1].weight
    assert list(find_blocks(model)) == ["layers.0", "layers.2"]


def test_blocks_that_share_a_parameter_are_none():
    model = bag(layers=nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    model.layers[3][0].bias = model.layers[0][0].bias
    assert list(find_blocks(model)) == ["layers.1", "layers.2"]


def test_a_parameter_that_is_shared_within_a_block_is_its_own():
    model = bag(layers=nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2)))
    model.layers[0][2].weight = model.layers[0][0].weight
    assert list(find_blocks(model)) == ["layers.0", "layers.1"]


def test_a_block_that_comes_twice_is_one():
    twice = nn.Linear(3, 3)
    assert list(find_blocks(bag(layers=nn.ModuleList([twice, twice, nn.Linear(3, 3)])))) == ["layers.0", "layers.2"]
    assert list(find_blocks(bag(layers=nn.ModuleList([twice, twice]), again=twice))) == ["layers.0"]


def test_blocks_that_share_a_module_are_none():
    common = nn.Linear(3, 3)
    both = bag(layers=nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), common) for _ in range(2)))
    assert list(find_blocks(both)) == []
    outside = bag(
        first=common, layers=nn.ModuleList([nn.Sequential(nn.Linear(3, 3), common), nn.Sequential(nn.Linear(3, 3))])
    )
    assert list(find_blocks(outside)) == ["layers.1"]


def test_lists_are_no_blocks():
    stages = bag(stages=nn.ModuleList(nn.ModuleList(linears(2)) for _ in range(2)), head=nn.Linear(3, 3))
    assert list(find_blocks(stages)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert list(find_blocks(own_tasks.DeepModel(2, 0.0), ["blocks*"])) == ["blocks.0", "blocks.1"]


# ---- recomputed


class Residual(nn.Module):
    """A block with dropout that wants a keyword and returns two tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 8)
        self.seen = None

    def forward(self, hidden, gates=(), *, scale=None):
        inner = self.drop(self.up(hidden).tanh()) * scale
        self.seen = weakref.ref(inner)
        for gate in gates:
            inner = inner * gate
        return hidden + self.down(inner), inner.mean()


class Stack(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))

    def forward(self, hidden):
        extra = 0
        for block in self.blocks:
            hidden, mean = block(hidden, [hidden.mean(), 2.0], scale=hidden.square().mean())
            extra = extra + mean
        return hidden.square().sum() + extra


def pass_through(recompute, autocast=False, **compute):
    """A forward and a backward pass, with recomputation as `compute` says.

    Returns:
        the bits of the loss and the gradients, the bytes that the forward pass kept for the backward pass, and which
        inner values lived until then.
    """
    torch.manual_seed(0)
    model, inputs = Stack(), torch.randn(16, 8, requires_grad=True)
    if recompute:
        recompute_activations(list(find_blocks(model).values()), CPU, ComputeConfig(**compute))
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ),
        torch.autocast("cpu", enabled=autocast),
    ):
        loss = model(inputs)
    alive = [block.seen() is not None for block in model.blocks]
    torch.randn(7)  # what is drawn in between changes nothing, and is not changed
    drawn = torch.randn(3).tolist()
    loss.backward()
    bits = [loss.tolist(), inputs.grad.tolist(), [parameter.grad.tolist() for parameter in model.parameters()]]
    return bits, sum(kept), alive, (drawn, torch.randn(3).tolist())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_recomputing_gives_the_same_bits_with_dropout_and_keywords_and_keeps_less(autocast):
    bits, kept, alive, drawn = pass_through(False, autocast)
    bits_again, kept_less, freed, drawn_again = pass_through(True, autocast)
    assert bits_again == bits
    assert drawn_again == drawn
    assert alive == [True] * 3
    assert freed == [False] * 3
    assert kept_less < kept / 4


class Products(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch 2.15, of this test
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("every", mainly([2], [1, 2]))
def test_matrix_products_are_not_computed_again_where_recomputation_is_selective(autocast, every):
    found = {}
    for mode in (None, "selective", "full"):
        with Products() as products:
            compute = {"activation_checkpointing": mode or "none", "recompute_every_blocks": every}
            bits, _, alive, drawn = pass_through(mode is not None, autocast, **compute)
        found[mode] = products.counts["addmm"], products.counts["tanh"], bits, drawn
        assert alive == ([True] * 3 if mode is None else [False] * 3 if every == 1 else [True, False, True])
    recomputed = 3 // every
    assert found["selective"][2:] == found["full"][2:] == found[None][2:]
    assert found["selective"][0] == found[None][0] == 6
    assert found["full"][0] > 6
    assert found["selective"][1] == found["full"][1] == 3 + recomputed


def test_more_blocks_apart_than_there_are_is_an_error():
    with pytest.raises(UsageError, match=r"recompute_every_blocks: the model has 3 repeated blocks"):
        recompute_activations(list(Stack().blocks), CPU, ComputeConfig(recompute_every_blocks=4))


def test_attention_is_kept_and_with_dropout_computed_again():
    """Attention on a GPU draws random numbers: where it is left out, later dropout would draw other numbers."""
    aten = torch.ops.aten
    inputs = [torch.zeros(1, 1, 2, 2)] * 3
    for operation in (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu):
        assert _keeps(None, operation.default, *inputs) is CheckpointPolicy.MUST_SAVE
        assert _keeps(None, operation.default, *inputs, 0.0, True) is CheckpointPolicy.MUST_SAVE
        assert _keeps(None, operation.default, *inputs, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
        assert _keeps(None, operation.default, *inputs, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _keeps(None, aten.convolution.default) is CheckpointPolicy.MUST_SAVE
    assert _keeps(None, torch.ops.higher_order.flex_attention) is CheckpointPolicy.MUST_SAVE
    assert _keeps(None, aten.native_dropout.default, *inputs) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("given", "mode"), [("none", False), ("full", True), (True, True), ("selective", "selective")])
def test_recomputation_has_the_names_of_torchtitan_too(given, mode):
    assert ComputeConfig(activation_checkpointing=given).activation_checkpointing == mode
    with pytest.raises(ValueError, match="selective"):
        ComputeConfig(activation_checkpointing="some")


def test_recomputing_changes_no_name_and_nothing_without_gradients():
    torch.manual_seed(0)
    model = Stack().eval()
    names, expected = list(model.state_dict()), model(torch.ones(2, 8)).tolist()
    recompute_activations(list(find_blocks(model).values()), CPU, ComputeConfig())
    with torch.no_grad():
        assert model(torch.ones(2, 8)).tolist() == expected
    assert list(model.state_dict()) == names
    assert list(find_blocks(model)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_recomputing_changes_no_buffer_twice():
    def buffers(recompute):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)])
        if recompute:
            recompute_activations(list(model), CPU, ComputeConfig())
        for _ in range(2):
            model(torch.randn(8, 4)).square().sum().backward()
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}

    assert buffers(True) == buffers(False)


class KeywordsAlone(nn.Module):
    """Three blocks with dropout, which are called with keywords alone, or with nothing that lies on the device."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Keyword() for _ in range(3))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden=hidden)
        return hidden.square().sum()


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, *, hidden):
        return hidden + self.drop(self.up(hidden).tanh())


def gradients_on_device(device, recompute):
    """The gradients by parameter, what is drawn afterwards, and how often a dropout was drawn."""
    from tests.python_device import NAME

    place = torch.device(NAME, 0)
    torch.manual_seed(0)
    model, inputs = KeywordsAlone(), torch.randn(16, 8)
    model, inputs = model.to(place), inputs.to(place)
    if recompute:
        recompute_activations(list(model.blocks), place, ComputeConfig())
    devices.of(place).seed(3)
    device.log.clear()
    loss = model(inputs)
    drawn = torch.rand(2, device=place)
    loss.backward()
    more = torch.rand(2, device=place)
    draws = sum("dropout" in one.name or "bernoulli" in one.name for one in device.log)
    return (
        [parameter.grad.host.tolist() for parameter in model.parameters()],
        drawn.host.tolist() + more.host.tolist(),
        draws,
    )


def test_blocks_that_are_called_with_keywords_alone_draw_the_same_dropout_again_on_a_device_with_its_own_generator():
    kept, drawn, draws = run_on_python_device(gradients_on_device, False)
    recomputed, drawn_again, draws_again = run_on_python_device(gradients_on_device, True)
    assert recomputed == kept
    assert drawn_again == drawn
    assert draws_again > draws > 0


# ---- compiled


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize("what", ["auto", "blocks", "model"])
def test_compiling_changes_no_name_and_no_result(what):
    torch.manual_seed(0)
    model = own_tasks.DeepModel(2, 0.0)
    names, parameters, expected = list(model.state_dict()), list(model.parameters()), model(torch.ones(2, 10))
    blocks = list(find_blocks(model).values())
    compile_modules(model, blocks, ComputeConfig(compile=what, compile_backend="eager"))
    assert model(torch.ones(2, 10)).tolist() == expected.tolist()
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == ([model] if what == "model" else blocks)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_a_model_without_blocks_is_compiled_as_a_whole_by_auto():
    model = nn.Linear(2, 2)
    compile_modules(model, [], ComputeConfig(compile="auto", compile_backend="eager"))
    assert model._compiled_call_impl is not None


class OwnClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, hidden):
        return self.layers(hidden)


class OwnSequence(nn.Sequential):
    """A class with torch's `forward`."""


BLOCKS = {
    "own class": OwnClass,
    "sequence": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
    "own sequence": lambda: OwnSequence(nn.Linear(8, 8), nn.Tanh()),
    "torch's layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.exhaustive  # as test_compiling_changes_no_name_and_no_result
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [
        pytest.param(kind, recomputes, marks=() if (kind, recomputes) == ("sequence", True) else pytest.mark.exhaustive)
        for kind in BLOCKS
        for recomputes in (False, True)
    ],
)
def test_blocks_of_each_class_are_compiled_also_where_there_are_many(kind, recomputes, monkeypatch):
    """`Module.compile` compiles nothing of torch's own classes, and torch compiles a code for eight modules at most."""
    compiled = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, backend, **_: real(call, backend=count))

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(10))
    if recomputes:
        recompute_activations(list(blocks), CPU, ComputeConfig())
    compile_modules(blocks, list(blocks), ComputeConfig(compile="blocks", compile_backend="eager"))
    hidden = torch.ones(2, 3, 8, requires_grad=True)
    for block in blocks:
        hidden = block(hidden)
    assert len(compiled) >= (1 if kind == "own class" else 10)  # blocks of an own class may share their code
    torch._dynamo.reset()


def normed_blocks():
    torch.manual_seed(0)
    block = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*[nn.Sequential(*map(copy.deepcopy, block)) for _ in range(2)])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_compiled_blocks_with_buffers_are_recomputed():
    def trained(compute):
        model = normed_blocks()
        if compute is not None:
            recompute_activations(list(model), CPU, ComputeConfig())
            compile_modules(model, list(model), compute)
        for _ in range(2):
            model(torch.randn(8, 4)).square().sum().backward()
        return [tensor.tolist() for tensor in (*(p.grad for p in model.parameters()), *model.buffers())]

    assert trained(ComputeConfig(compile="blocks", compile_backend="aot_eager")) == trained(None)
    model = normed_blocks()
    recompute_activations(list(model), CPU, ComputeConfig())
    with pytest.raises(UsageError, match="recomputation of blocks with buffers") as caught:
        compile_modules(model, list(model), ComputeConfig(compile="model", compile_backend="aot_eager"))
    assert "activation_checkpointing" in str(caught.value.where)


def test_an_unknown_backend_is_an_error_that_names_the_known_ones():
    with pytest.raises(
        UsageError, match=r"compute\.compile_backend: torch\.compile has no backend 'inductr'[\s\S]*inductor"
    ) as caught:
        compile_modules(nn.Linear(2, 2), [], ComputeConfig(compile="model", compile_backend="inductr"))
    assert caught.value.where == "compute.compile_backend"


def test_blocks_of_a_model_that_has_none_cannot_be_compiled():
    with pytest.raises(UsageError, match="no repeated blocks") as caught:
        compile_modules(nn.Linear(2, 2), [], ComputeConfig(compile="blocks", compile_backend="eager"))
    assert caught.value.where == "compute.compile=blocks"
