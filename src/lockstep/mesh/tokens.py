"""Blocks that hold the activations between their sharded layers for a part of the tokens on each rank.

This is sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). A block receives and returns all
tokens. Inside, each rank has its part: norms, dropout and sums see this part. A `colwise` layer gathers the parts, and
a `rowwise` layer gives each rank the sum of its part. For the backward pass, a `colwise` layer keeps only the part,
which is then gathered again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel.sharded_tensor import local
from lockstep.mesh.group import TensorGroup
from lockstep.mesh.plans import SEES, SEQUENCE, ShardingPlan


class _Known(NamedTuple):
    """The part that was gathered last, and the gathered result."""

    key: tuple[Any, ...]
    part: Tensor  # its memory is not reused as long as it is here
    whole: Tensor


class Last:
    """The parts that were gathered last, of all blocks of a model: layers with the same part gather it once."""

    known: _Known | None = None


class Tokens:
    """The tokens of a block in a call, in the second-to-last dimension.

    If the number of tokens does not divide, the last parts are padded, and results for the padding are dropped.
    """

    def __init__(self, name: str, group: TensorGroup, last: Last) -> None:
        self.name, self.group, self.last = name, group, last
        self.count = 0
        self.entered = torch.Size()  # the shape of the part that the block gets, without its width
        self.seen: tuple[Tensor, Tensor] | None = None  # all tokens, which a module sees instead of its part

    @property
    def of_part(self) -> int:
        """Tokens of a part."""
        return -(-self.count // self.group.ranks)

    def part(self, whole: Tensor, repeat: bool = False) -> Tensor:
        """This rank's part. It is padded with zeros, or with the last token: no norm of it is infinite."""
        size, count = self.of_part, whole.shape[-2]
        begin = min(self.group.rank * size, count)
        held = whole.narrow(-2, begin, min(size, count - begin))
        missing = size - held.shape[-2]
        if not missing:
            return held.clone(memory_format=torch.contiguous_format)
        filling = whole.narrow(-2, count - 1, 1).expand(*held.shape[:-2], missing, -1)
        return torch.cat([held, filling if repeat else torch.zeros_like(filling)], dim=-2)

    def whole(self, part: Tensor) -> Tensor:
        """All tokens, gathered from the parts of all ranks."""
        found = torch.cat([*self.group.gather(part)], dim=-2)
        return found if found.shape[-2] == self.count else found.narrow(-2, 0, self.count).clone()

    def whole_once(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """`whole`, gathered once for consecutive layers with the same part and no wider format."""
        version = 0 if part.is_inference() else part._version
        key = (part.untyped_storage()._cdata, part.storage_offset(), part.shape, version)
        known, self.last.known = self.last.known, None
        if known is None or known.key != key or torch.promote_types(known.whole.dtype, dtype) != known.whole.dtype:
            known = _Known(key, part, self.whole(part.to(dtype)))
        self.last.known = known = known._replace(whole=known.whole.to(dtype))
        return known.whole

    def added(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over ranks."""
        missing = self.of_part * self.group.ranks - whole.shape[-2]
        filled = functional.pad(whole, (0, 0, 0, missing)) if missing else whole
        parts = filled.reshape(*whole.shape[:-2], self.group.ranks, self.of_part, whole.shape[-1])
        return self.group.scatter(parts.movedim(-3, 0).contiguous())


# ---- exchanges in the forward pass, and of the gradient in the backward pass


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tokens: Tokens, way: str) -> Tensor:
        ctx.tokens, ctx.way, ctx.count = tokens, way, tokens.count
        if way == "enter":
            return tokens.part(tensor, repeat=True)
        if way == "add":
            return tokens.added(tensor)
        return tokens.whole_once(tensor, tensor.dtype).detach() if way == "see" else tokens.whole(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, way = ctx.tokens, ctx.way
        tokens.count = ctx.count  # another call may have changed it
        if way == "enter":
            tokens.last.known = None
        ways = {"enter": tokens.whole, "add": tokens.whole, "see": tokens.added, "leave": tokens.part}
        return ways[way](grad), None, None


class _Columns(torch.autograd.Function):
    """A `colwise` layer that receives a part of the tokens and returns its outputs for all tokens."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens) -> Tensor:
        device, dtype = part.device.type, part.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.save_for_backward(part, weight)
        ctx.tokens, ctx.count, ctx.of_bias = tokens, tokens.count, None if bias is None else bias.dtype
        whole = tokens.whole_once(part, dtype)
        return functional.linear(whole, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        by_part = by_weight = by_bias = None
        ctx.tokens.count = ctx.count
        flat = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            whole = ctx.tokens.whole_once(part, grad.dtype)
            by_weight = (flat.T @ whole.flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            by_bias = flat.sum(dim=0).to(ctx.of_bias)
        if ctx.needs_input_grad[0]:
            by_part = ctx.tokens.added(grad @ weight.to(grad.dtype)).to(part.dtype)
        return by_part, by_weight, by_bias, None


_exchanged: Any = _Exchange.apply
_columns: Any = _Columns.apply


# ---- modules


def _colwise(layer: Any, name: str, tokens: Tokens, given: Tensor) -> Any:
    if tokens.seen is not None and given is tokens.seen[0]:
        given = tokens.seen[1]
    if given.shape[-2] != tokens.of_part:
        raise TrainingError(
            f"{name} gets {given.shape[-2]} tokens in a block of {tokens.count}; each rank has {tokens.of_part}",
            where="Task.tensor_plan",
            remedy=f"remove sequence_parallel for {tokens.name}; see lockstep --explain mesh",
        )
    return _columns(given, local(layer.weight), None if layer.bias is None else local(layer.bias), tokens)


def _rowwise(layer: Any, tokens: Tokens, given: Tensor) -> Any:
    tokens.last.known = None
    summed = _exchanged(functional.linear(given, local(layer.weight)), tokens, "add")
    return summed if layer.bias is None else summed + local(layer.bias).to(summed.dtype)


def arrange(model: nn.Module, plan: ShardingPlan, group: TensorGroup) -> None:
    """Make blocks with the style `sequence_parallel` work on parts. The weights of their layers are already sharded."""
    last = Last()
    blocks = {name: Tokens(name, group, last) for name, style in plan.styles.items() if style == SEQUENCE}
    for name, block in plan.inside.items():
        module: Any = model.get_submodule(name)
        if (style := plan.styles[name]) == SEES:
            _let_see(module, name, blocks[block])
        elif style == "colwise":
            module.forward = partial(_colwise, module, name, blocks[block])
        else:
            module.forward = partial(_rowwise, module, blocks[block])
    for name, tokens in blocks.items():
        _cut_block(model.get_submodule(name), tokens)


def _cut_block(block: nn.Module, tokens: Tokens) -> None:
    """Replace the first tensor that a block receives by its part of the tokens, and return all of them."""

    def enter(_: Any, args: Any, options: Any) -> Any:
        others = (*args, *options.values())

        def part(whole: Tensor) -> Any:
            remedy = "use sequence_parallel for blocks whose first argument is (samples, tokens, width)"
            if whole.ndim < 3 or not whole.is_floating_point():
                what = f"{tokens.name} first receives {whole.dtype} of shape {tuple(whole.shape)}, which has no tokens"
                raise TrainingError(what, where="Task.tensor_plan", remedy=remedy)
            tokens.count = whole.shape[-2]
            held: Tensor = _exchanged(whole, tokens, "enter")
            tokens.entered = held.shape[:-1]
            if tokens.of_part > 1 and any(_is_alike(other, held) for other in others if other is not whole):
                what = f"{tokens.name} first receives {tuple(whole.shape)}, and a second tensor with its part's shape"
                raise TrainingError(what, where="Task.tensor_plan", remedy=remedy)
            return held

        return _with_first(args, options, part)

    def leave(_: Any, __: Any, output: Any) -> Any:
        tokens.last.known = None
        given = output if isinstance(output, tuple) else (output,)
        first, *others = given
        is_part = isinstance(first, Tensor) and first.shape[:-1] == tokens.entered
        if not is_part or any(_is_alike(other, first) for other in others):
            shown = listed([str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in given], 3)
            raise TrainingError(
                f"{tokens.name} returns {shown} instead of {tokens.of_part} of {tokens.count} tokens in a tensor, like "
                f"its first input: ({', '.join(map(str, tokens.entered))}, width)",
                where="Task.tensor_plan",
                remedy="use sequence_parallel for blocks that return (samples, tokens, width), alone or before values "
                "without tokens in a tuple",
            )
        whole = _exchanged(first, tokens, "leave")
        return (whole, *others) if isinstance(output, tuple) else whole

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave)


def _is_alike(other: Any, part: Tensor) -> bool:
    """Whether a tensor has the samples and tokens of another."""
    return isinstance(other, Tensor) and other.ndim > 1 and other.shape[:-1] == part.shape[:-1]


def _let_see(module: nn.Module, name: str, tokens: Tokens) -> None:
    """Give a module in a block all tokens instead of its part."""

    def enter(_: Any, args: Any, options: Any) -> Any:
        def see(part: Tensor) -> Tensor:
            if part.shape[-2:-1] != (tokens.of_part,):
                what = f"{name} first receives {tuple(part.shape)} instead of {tokens.of_part} of {tokens.count} tokens"
                remedy = "use sequence_gather for modules whose first argument is (samples, tokens, width)"
                raise TrainingError(what, where="Task.tensor_plan", remedy=remedy)
            whole: Tensor = _exchanged(part, tokens, "see")
            tokens.seen = (whole, part)
            return whole

        return _with_first(args, options, see)

    def leave(*_: Any) -> None:
        tokens.seen = None

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _with_first(args: tuple[Any, ...], options: dict[str, Any], change: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of a module, with a different first tensor."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:place], change(value), *args[place + 1 :]), options
    for key, value in options.items():
        if isinstance(value, Tensor):
            return args, {**options, key: change(value)}
    return args, options
