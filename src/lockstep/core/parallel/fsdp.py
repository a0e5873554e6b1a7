"""FSDP2: rows of parameters, gradients and optimizer state are spread over ranks; a block is gathered when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import devices
from lockstep.core.blocks import find_ends
from lockstep.core.errors import UsageError
from lockstep.core.parallel import torch_internals
from lockstep.core.parallel import world as worlds
from lockstep.core.parallel.gathered_writes import GatheredWrites
from lockstep.core.parallel.meta_init import build_on_meta, materialise
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.sharded_tensor import is_spread
from lockstep.core.parallel.single import Single, constant_loss_error, leaves, unused_error
from lockstep.core.parallel.strategy import CallsVary, Forward, Losses, TrialPass, Waits
from lockstep.core.parallel.world import World

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(Single):
    """`torch.distributed.fsdp.fully_shard` on the blocks and on the `Forward`. For the methods, see `Strategy`."""

    forward: Any
    is_sharded = True

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world)
        self.options = options
        self._waits: list[tuple[Any, Any]] | None = []  # marks around the gathering of blocks; None: not marked
        self._modules: list[Any] = []  # those to which `fully_shard` was applied, the root first
        self._units: list[tuple[Any, bool]] = []  # without the root, and whether they are freed after a forward pass
        self._writes: GatheredWrites | None = None
        self._hooks: dict[int, Any] = {}  # by gathered parameter: it notes that the parameter got a gradient
        self._used: set[int] = set()  # the gathered parameters that got one, in this step
        self._values: dict[str, Tensor] = {}  # on rank 0, from `build_model` to `wrap`: the values of the model

    def build_model(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, list[str]]:
        model, self._values, messages = build_on_meta(make, self.world)
        return model, messages

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        if self._modules:  # it is sharded already
            self._note_trainable()
            for parameter, gathered in self._gathered():  # else a block gets its value when it is gathered again
                gathered.requires_grad_(parameter.requires_grad)
            return
        first, last = ([], []) if self.options.shard_modules else self._ends(forward.model, blocks)
        frees = self.options.reshard_after_forward
        self._units = [(unit, frees) for unit in (*first, *blocks)]
        self._units += [(unit, False) for unit in last]  # the backward pass begins with it
        _check_parameters(forward, [unit for unit, _ in self._units])
        mesh = self._mesh()
        self._shard(forward, mesh)
        self.forward = self.unwrapped = forward
        self._modules = [_root(forward), *(unit for unit, _ in self._units)]
        device = torch.device("cpu") if self.options.cpu_offload else self.world.device
        materialise(forward.model, self._values, self.world, device)
        for module in self._modules:
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13: `_check_used` then names them
                module.set_reduce_scatter_unused_params(True, recurse=False)
        self._let_passes_agree(forward)
        self._mark_waits(forward)
        if self._waits is not None:  # a hook would break compiled code into pieces
            self._writes = GatheredWrites(forward, self._modules)
        self._note_trainable()

    def _mark_waits(self, forward: nn.Module) -> None:
        """Mark when a forward pass begins to gather a block, and when the block is there.

        A slow rank makes the others wait there, so that the passes of all ranks take equally long.
        """
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in forward.modules()):
            self._waits = None  # a hook would break the compiled code into pieces
            return
        if self.world.size == 1:
            return
        device, waits = devices.of(self.world.device), self._waits
        begun: list[Any] = []

        def begin(module: nn.Module, _: Any) -> None:
            if module.training:  # nobody takes the marks of an evaluation
                begun[:] = [device.mark()]

        def end(module: nn.Module, _: Any) -> None:
            if module.training and waits is not None:
                waits.append((begun[0], device.mark()))

        for module in self._modules:  # whose own hook gathers, between these two
            module.register_forward_pre_hook(begin, prepend=True)
            module.register_forward_pre_hook(end)

    def _take_waits(self) -> list[tuple[Any, Any]] | None:
        if self._waits is None:
            return None
        taken = self._waits[:]
        self._waits.clear()
        return taken

    def _let_passes_agree(self, forward: nn.Module) -> None:
        """Let modules whose calls vary call their blocks equally often on all ranks."""
        world = self.world

        def largest(number: int) -> int:  # a function, and no bound method: a copy of the module shares the world
            return world.all_max(number)

        for module in forward.modules():
            if isinstance(module, CallsVary):
                module.largest_over_ranks = largest

    def begin_step(self, trial: TrialPass | None = None) -> Any:
        if trial is None and self._writes is not None:  # before an evaluation or a save, the host may wait
            self._writes.read_sums()
        return super().begin_step(trial)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self._modules[0].set_requires_gradient_sync(last or self.options.reduce_each_micro_batch)
        self._modules[0].set_requires_all_reduce(last)  # over the replicas of a hybrid mesh
        return contextlib.nullcontext()

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        if self._writes is not None:
            self._writes.check(last)
        waits = super().backward(losses, factors, last or self.options.reduce_each_micro_batch)
        if waits is None or not self.options.reduce_each_micro_batch:
            return waits
        return Waits(waits.ended, None) if last else None  # it has waited in earlier backward passes, too

    def _changed_while_gathered(self) -> set[int]:
        return {id(p) for p, gathered in self._gathered() if p.requires_grad != gathered.requires_grad}

    def _gathered(self) -> Iterator[tuple[Tensor, Tensor]]:
        for module in self._modules:
            yield from torch_internals.gathered_parameters(module)

    def _check_all_used(self, losses: Losses) -> None:
        super()._check_all_used(losses)
        for _, gathered in self._gathered():
            if id(gathered) not in self._hooks and gathered.requires_grad:
                hook: Any = gathered.register_post_accumulate_grad_hook(self._note_used)  # type: ignore[no-untyped-call]
                self._hooks[id(gathered)] = hook

    def _note_used(self, gathered: Tensor) -> None:
        self._used.add(id(gathered))

    def _check_reduced(self) -> None:
        self._check_used("on this rank")

    def _check_used(self, where: str) -> None:
        """Raises TrainingError, with the names, if parameters got no gradient since the last call."""
        missing = self._hooks.keys() - self._used
        self._used.clear()
        if missing:
            names = {id(parameter): name for name, parameter in self.trainable.items()}
            of_missing = [names[id(parameter)] for parameter, gathered in self._gathered() if id(gathered) in missing]
            raise unused_error(of_missing, "Task.loss", f" {where}, though they did before")

    def _own_leaves(self) -> set[int]:
        return super()._own_leaves() | {id(gathered) for _, gathered in self._gathered()}

    def _zero_roots(self, losses: Losses, constants: Sequence[str], last: bool) -> list[nn.Parameter]:
        raise constant_loss_error(constants[0], "parallel.strategy=fsdp")

    def leaves(self) -> dict[str, Tensor]:
        found = {id(p): gathered for p, gathered in self._gathered()}
        if any(id(parameter) not in found for parameter in self.trainable.values()):
            for module in self._modules:
                module.unshard()
                module.reshard()
            found = {id(p): gathered for p, gathered in self._gathered()}
        return {name: found[id(parameter)] for name, parameter in self.trainable.items()}

    def backward_alone(self, losses: Losses, factors: Losses) -> None:
        self._modules[0].set_requires_gradient_sync(False)
        torch.autograd.backward(*self._roots(losses, factors, last=False))
        for module in self._modules:
            torch_internals.drop_gathered_gradients(module)

    @contextlib.contextmanager
    def inference(self) -> Generator[Forward, None, None]:
        self._reshard()
        # A block that stays gathered after its first call needs no collective in further calls. Other ranks may
        # make fewer of them. The root always stays gathered.
        kept = self._units if self.forward.calls_vary else []
        for unit, _ in kept:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield self.unwrapped
        finally:
            for unit, frees in kept:
                unit.set_reshard_after_forward(frees, recurse=False)
            self._reshard()

    def _reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def _replaced(self) -> list[str]:
        # A block is sharded again after its forward pass, and then has FSDP's own objects: `_unused_parameters` finds
        # that the pass has used others.
        names = {id(module): name for name, module in self.unwrapped.model.named_modules()}
        return [
            f"{names.get(id(owner), '')}.{key}".lstrip(".")
            for module in self._modules
            for owner, key, known in torch_internals.sharded_places(module)
            if (now := owner._parameters.get(key)) is not None
            and not any(now is one for one in known)
            and (now.requires_grad or known[0].requires_grad)
        ]

    def _unused_parameters(self, losses: Losses) -> dict[str, bool]:
        # Blocks are gathered one by one: the graph knows the tensors into which the parameters were gathered.
        used = leaves(losses)
        unused: dict[str, bool] = {}
        for block in (None, *self._modules[1:]):
            was_sharded = block is not None and any(map(is_spread, block.parameters()))
            if was_sharded:
                block.unshard()
            for name, parameter in self.unwrapped.model.named_parameters():
                if parameter.requires_grad and not is_spread(parameter):
                    unused.setdefault(name, id(parameter) not in used)
            if was_sharded:
                block.reshard()
        return unused

    def _ends(self, model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
        """The large embeddings and last layers that are sharded separately."""
        return find_ends(model, blocks)

    def _mesh(self) -> Any:
        """The device mesh: a dimension `shard`, after a dimension `replicate` if `shard_ranks` is less than the
        world."""
        ranks = self.world.size
        size = shard_size(ranks, self.options.shard_ranks)
        return make_mesh(self.world, {"shard": size} if size == ranks else {"replicate": ranks // size, "shard": size})

    def _shard(self, forward: nn.Module, mesh: Any) -> None:
        """Apply `fully_shard` to each of the units, then to `forward` as the root.

        Parameters outside the units belong to the root: they are gathered for the whole forward and backward pass. All
        parameters stay in their own dtype, whatever dtype they are gathered in. They may be on the meta device.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = self.options
        attributes = {name: vars(parameter) for name, parameter in forward.named_parameters()}
        # Inputs keep their dtype: autocast chooses one for each operation, and targets of a regression are not
        # parameters.
        param_dtype = _DTYPES.get(options.param_dtype or "")
        reduce_dtype = _DTYPES.get(options.reduce_dtype or "", torch.float32 if param_dtype else None)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        # Annotated, because the types of the options differ between torch versions.
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if options.cpu_offload:
            common["offload_policy"] = CPUOffloadPolicy(pin_memory=devices.of(self.world.device).has_own_memory)
        for unit, frees in self._units:
            fully_shard(unit, reshard_after_forward=frees, **common)
        fully_shard(_root(forward), **common)
        for name, parameter in forward.named_parameters():
            vars(parameter).update(attributes[name])  # those that a model sets; FSDP makes new objects
        units = [unit for unit, _ in self._units]
        for place, unit in enumerate(units):
            if options.forward_prefetch:
                unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + options.forward_prefetch])
            if options.backward_prefetch:
                unit.set_modules_to_backward_prefetch(units[max(0, place - options.backward_prefetch) : place][::-1])


def _root(forward: Any) -> nn.Module:
    """The module whose call gathers the parameters outside of the units."""
    root: nn.Module = forward.model if forward.is_bypassed else forward
    return root


def _check_parameters(forward: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise if FSDP cannot shard a parameter, with its name, or cannot be used with CUDA graphs."""
    of_block = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    if forward.uses_graphs:
        raise UsageError(
            "CUDA graphs read the same memory each time, and sharded parameters are gathered into other memory",
            where="compute.compile_mode, parallel.strategy=fsdp",
            remedy="use compute.compile_mode=max-autotune-no-cudagraphs or default, or parallel.strategy=ddp",
        )
    groups: dict[int, dict[torch.dtype, str]] = {}  # by block (-1: the root): the name of a parameter of each dtype
    for name, parameter in forward.named_parameters():
        name = name.removeprefix("model.")
        if parameter.ndim == 0:
            raise UsageError(
                f"parameter {name} has no dimension to shard",
                where="parallel.strategy=fsdp",
                remedy="make it a tensor of one element, shape (1,), or use ddp",
            )
        if parameter.requires_grad:
            groups.setdefault(of_block.get(id(parameter), -1), {}).setdefault(parameter.dtype, name)
    for group in groups.values():
        if len(group) > 1:
            named = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in group.items())
            raise UsageError(
                f"parameters that are sharded together have several dtypes: {named}",
                where="parallel.strategy=fsdp",
                remedy="use one dtype, or list modules of a different dtype separately in parallel.shard_modules",
            )


def shard_size(ranks: int, wanted: int | None) -> int:
    """The number of neighbouring ranks over which a model is sharded: `wanted`, or all.

    Raises:
        UsageError: `wanted` does not divide the number of ranks.
    """
    size = wanted or ranks
    if size > ranks or ranks % size:
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise UsageError(
            f"{ranks} ranks cannot be split into groups of {size}",
            where="parallel.shard_ranks",
            remedy=f"use one of {', '.join(map(str, divisors))}",
        )
    return size


def make_mesh(world: World, shape: Mapping[str, int]) -> Any:
    """The device mesh of all ranks, with the sizes of its dimensions by name, the outermost first."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    groups = [mesh.get_group(name) for name in shape]
    if world.timeout is not None:  # groups of a hybrid mesh would have torch's own timeout
        for group in groups:
            torch_internals.set_timeout(group, world.timeout)
    worlds.retire(groups)
    return mesh
