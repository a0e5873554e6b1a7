"""Checkpoints without frozen weights: they contain a digest of these instead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core import keywords
from lockstep.core.errors import UsageError, listed
from lockstep.core.parameter_names import matches, names_of_parameters

M = TypeVar("M", bound=nn.Module)
BASE = "frozen_base"
"""The name of the module that replaces the frozen weights in a model's `state_dict`."""
_UNUSED = ".original_module."  # peft's copy of a layer that trains completely
_MANY = 1_000_000  # from this many frozen parameters, the log suggests `trained_only`


@partial(keywords.checked, name="trained_only")
def trained_only(model: M, name: str | None = None, *, keep: str | Sequence[str] = ()) -> M:
    """Leave the frozen weights of a model out of its `state_dict` and checkpoints: for `Task.model`.

    Their names and values are hashed. A run only resumes with the same frozen weights, which `Task.model` creates each
    time. So they must not change: if training changes them, the run ends with an error. Buffers stay in the
    `state_dict`.

    Args:
        model: changed in place. Its tensors may be on the meta device.
        name: the name of the frozen weights, for errors. None: where transformers loaded them from, or the name of the
            class.
        keep: patterns (`*` and `?`) for names of frozen parameters that stay in the `state_dict`, because they change
            without an optimizer, such as those of an EMA teacher.

    Returns:
        `model`.

    Raises:
        UsageError: all parameters train, or none, or a pattern of `keep` does not match any frozen parameter.
    """
    parameters = dict(model.named_parameters())
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    if not frozen or len(frozen) == len(parameters):
        what = f"{'all' if frozen else 'none'} of the {len(parameters)} parameters are frozen"
        remedy = (
            "freeze the parameters that do not train with parameter.requires_grad_(False), or return the model itself"
        )
        raise UsageError(what, where="lockstep.trained_only", remedy=remedy)
    names, patterns = names_of_parameters(model), [keep] if isinstance(keep, str) else keep
    for pattern in patterns:
        if not any(matches(names[key], [pattern]) for key in frozen):
            remedy = f"use patterns over names such as: {listed(list(frozen), 5)}"
            raise UsageError(
                f"{pattern!r} does not match any frozen parameter", where="trained_only(keep=...)", remedy=remedy
            )
    changing = {id(parameter) for key, parameter in frozen.items() if matches(names[key], patterns)}
    name = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
    hashed = {key: one for key, one in frozen.items() if id(one) not in changing and _UNUSED not in f".{key}."}
    held = model.state_dict(keep_vars=True)
    kept = {
        key
        for key, value in held.items()
        if not isinstance(value, nn.Parameter) or value.requires_grad or id(value) in changing
    }
    digest = torch.empty(16, dtype=torch.uint8) if _is_meta(frozen) else digest_of(hashed)
    return leave_out(model, kept, FrozenBase(name, digest, where="Task.model"))


def leave_out(model: M, kept: Iterable[str], base: FrozenBase) -> M:
    """Make `base` replace all entries of a model's `state_dict` except `kept`."""
    names = {*kept, f"{BASE}._extra_state"}
    model.add_module(BASE, base)
    hooked: Any = model
    hooked.register_state_dict_post_hook(partial(_leave_out, names))
    hooked.register_load_state_dict_post_hook(partial(_let_miss, names))
    return model


def digest_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """A digest of tensors and their names: (16), uint8."""

    def of_tensor(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        found = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        found.update(content)
        return found.digest()

    with ThreadPoolExecutor() as pool:
        found = b"".join(pool.map(of_tensor, sorted(tensors.items())))
    return torch.frombuffer(bytearray(hashlib.blake2b(found, digest_size=16).digest()), dtype=torch.uint8)


class FrozenBase(nn.Module):
    """Replaces the frozen weights in a model's state: a checkpoint contains their name and digest instead of their
    values.

    Args:
        name: the name of the model that has these weights.
        digest: the digest of the weights, (16), uint8. With FSDP, ranks without weights get it from rank 0.
        where: what provides the weights, for errors.
    """

    digest: Tensor

    def __init__(self, name: str, digest: Tensor, where: str) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.register_buffer("digest", digest, persistent=False)

    def forward(self, value: Any) -> Any:
        """`value`: the last module of an `nn.Sequential` is called."""
        return value

    def get_extra_state(self) -> dict[str, Any]:
        """The name and the digest."""
        return {"model": self.name, "digest": self.digest}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Compare with a checkpoint.

        Raises:
            UsageError: the trained weights in it belong to different frozen weights.
        """
        if torch.equal(state["digest"].cpu(), self.digest.cpu()):
            return
        then, now = (bytes(digest.tolist()).hex() for digest in (state["digest"], self.digest))
        what = (
            f"the adapters belong to the weights of {state['model']} (digest {then}), but {self.name} has the "
            f"digest {now}"
        )
        remedy = f"let {self.where} return the frozen weights that the run started with (random initial weights "
        remedy += "differ each time), or start again with --fresh"
        raise UsageError(what, where=self.where, remedy=remedy)


def note(model: nn.Module) -> list[str]:
    """A note for the log, if checkpoints would consist mostly of frozen weights."""
    if BASE in model._modules:
        return []
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    if counts[False] < max(_MANY, counts[True]):
        return []
    share = counts[False] / sum(counts.values())
    text = f"note: {share:.0%} of the parameters are frozen, and every checkpoint contains them; "
    return [f"{text}`return lockstep.trained_only(model)` in Task.model leaves them out: lockstep --explain lora"]


def _is_meta(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_meta for tensor in tensors.values())


def _leave_out(kept: set[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Reduce a state to trainable weights and the digest, as long as the model has a frozen base."""
    if BASE not in module._modules:
        return
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in kept]:
        del state[name]


def _let_miss(kept: set[str], _: nn.Module, keys: Any) -> None:
    """Make the model load a state that `_leave_out` produced."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in kept]
