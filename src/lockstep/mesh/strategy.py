"""A mesh (replicate, shard, tensor): neighbours hold the layers of a model together, and FSDP2 shards what each holds.

`parallelize_module` shards the layers that the plan names, by columns or rows, over the dimension `tensor`. Then
`fully_shard` works on the dimensions `replicate` and `shard`. One of these may have size 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.errors import TrainingError, number_of
from lockstep.core.parallel.fsdp import FSDP, make_mesh, shard_size
from lockstep.core.parallel.gradients import is_cut
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.strategy import Forward, Losses, Waits
from lockstep.core.parallel.world import World
from lockstep.mesh import plans, tokens
from lockstep.mesh.group import Joined

_ROWS_SHOWN = 16


class MeshFSDP(FSDP):
    """FSDP2 over tensor groups, whose ranks hold shards of the layers. For the methods, see `Strategy`.

    With `parallel.strategy=ddp`, every tensor group holds the whole model. With `fsdp`, each rank holds some rows of
    the shard of its position in the group.
    """

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world, options)
        shards = 1 if options.strategy == "ddp" else shard_size(world.replicas, options.shard_ranks)
        self.shape = {"replicate": world.replicas // shards, "shard": shards, "tensor": world.tensor}
        self._summed: set[str] = set()  # parameters whose gradient on each rank covers only its heads
        self._uncut: list[str] = []  # names of the parameters that are equal on all ranks of a tensor group
        self._messages: list[str] = []

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of all ranks."""
        return make_mesh(self.world, self.shape)

    def _ends(self, model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
        # A sharded last layer returns a view of its logits, which FSDP units may not: it stays with the root.
        first, last = super()._ends(model, blocks)
        return first, [layer for layer in last if not any(hasattr(p, "device_mesh") for p in layer.parameters())]

    def _mesh(self) -> Any:
        return self.mesh["replicate", "shard"]

    def build_model(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, list[str]]:
        model, messages = super().build_model(make)
        self._messages = [*table(self.shape), *messages]
        return model, self._messages

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        if not self._modules:
            self._cut(forward)
        super().wrap(forward, blocks)
        self._uncut = [name for name, parameter in self.trainable.items() if not is_cut(parameter)]

    def _cut(self, forward: Forward) -> None:
        """Shard the layers of a model on the meta device, according to the plan. Nothing is sent."""
        from torch.distributed.tensor.parallel import parallelize_module

        model = forward.model
        plan = plans.plan_of(model, forward.tensor_plan(), self.world.tensor)
        attributes = {name: vars(parameter) for name, parameter in model.named_parameters()}
        styles, mesh = _styles(), self.mesh["tensor"]
        group = Joined(self.world.tensor, mesh.get_local_rank(), mesh.get_group())
        for name, style in plan.styles.items():
            module = model.get_submodule(name)
            if style in (plans.SUMMED, plans.SEQUENCE):
                self._summed |= {f"{name}.{key}" for key, _ in module.named_parameters()}
            elif name in plan.inside:
                _spread(module, mesh, style)
            else:
                buffers = dict(module._buffers)
                parallelize_module(module, mesh, styles[style](), src_data_rank=None)
                module._buffers.update(buffers)  # whole on each rank, like those of the other layers
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_copied)
                module.register_forward_pre_hook(functools.partial(_check_words, name), prepend=True)
            if style == plans.WORDS:
                vars(module)["tensor_group"] = group  # for a loss that does not need the whole logits
        for one, other in plan.tied:
            model.get_submodule(one).weight = model.get_submodule(other).weight
        tokens.arrange(model, plan, group)
        for name, parameter in model.named_parameters():
            vars(parameter).update(attributes[name])  # set by a model; torch makes new objects
        count = sum(style in plans.CUT for style in plan.styles.values())
        self._messages += [f"  {number_of(count, 'layer', 'is', 'are')} sharded over each tensor group", *plan.notes]
        if forward.tensor_plan() is not None:
            self._messages.append("  note: nothing here checks Task.tensor_plan; a wrong one trains a different model")
            self._messages.append("  lockstep verify --checks strategies shows with a small model whether it fits")

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        waits = super().backward(losses, factors, last)
        if last:
            self._agree_on_uncut()
        return waits

    def _agree_on_uncut(self) -> None:
        """Give the ranks of a tensor group the same gradients for the parameters that they share.

        These are equal, like samples and seeds, if each kernel is deterministic. Without this mean, other kernels would
        let the ranks diverge. The mean over 2, 4 or 8 equal numbers is that number, bit for bit.
        """
        grads: dict[torch.dtype, list[tuple[torch.Tensor, bool]]] = {}
        for name in self._uncut:
            grad = self.trainable[name].grad
            if grad is not None:
                grads.setdefault(grad.dtype, []).append((local(grad), name in self._summed))
        for of_dtype in grads.values():
            parts = [grad.reshape(-1) if summed else grad.reshape(-1) / self.world.tensor for grad, summed in of_dtype]
            flat = torch.cat(parts)
            dist.all_reduce(flat, group=self.mesh.get_group("tensor"))
            for (grad, _), values in zip(of_dtype, torch.split(flat, [part.numel() for part in parts]), strict=True):
                grad.copy_(values.view(grad.shape))


def _check_words(name: str, module: nn.Embedding, inputs: tuple[Any, ...]) -> None:
    """Refuse words that an embedding lacks: each rank would attribute them to another, and return zeros.

    On a GPU the kernel fails later, like that of a whole embedding, because a rank must not wait in each pass.
    """
    words = local(inputs[0])
    is_known = ((words >= 0) & (words < module.num_embeddings)).all()
    if words.device.type == "cpu" and not is_known:
        what = f"the embedding has {module.num_embeddings} rows, but was given {int(words.min())} to {int(words.max())}"
        raise TrainingError(what, where=name, remedy="give the embedding a row for each word of the tokenizer")
    torch._assert_async(is_known)


def _copied(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A copy of the output of a sharded embedding: it may be an FSDP unit, which must not return a view."""
    return output.clone()


def _spread(module: nn.Module, mesh: Any, style: str) -> None:
    """Shard the parameters of a layer, which works as before. `tokens.arrange` makes it work on parts of the tokens."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for key, parameter in list(module.named_parameters(recurse=False)):
        whole = style == "rowwise" and key == "bias"
        placed = [Replicate() if whole else Shard(int(style == "rowwise"))]
        made = distribute_tensor(parameter.detach(), mesh, placed, src_data_rank=None)
        setattr(module, key, nn.Parameter(made, parameter.requires_grad))


def _styles() -> dict[str, Callable[[], Any]]:
    """torch's names of the styles. Imported late: it takes a second."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "colwise": ColwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }


def table(shape: dict[str, int]) -> list[str]:
    """Lines with the position of each rank in the mesh: a row for each tensor group."""
    replicas, shards, tensor = shape.values()
    lines = [f"mesh: {replicas * shards * tensor} ranks = {replicas} replicate x {shards} shard x {tensor} tensor"]
    for group in range(min(replicas * shards, _ROWS_SHOWN)):
        ranks = " ".join(f"{rank:>4}" for rank in range(group * tensor, (group + 1) * tensor))
        lines.append(f"  replicate {group // shards:>3}, shard {group % shards:>3}: ranks {ranks}")
    if replicas * shards > _ROWS_SHOWN:
        lines.append(f"  ... and {number_of(replicas * shards - _ROWS_SHOWN, 'more tensor group')}")
    return lines
