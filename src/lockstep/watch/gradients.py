"""What a rank computes from a micro-batch, recorded by hooks: its losses, and its gradients before the exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parts.digest import SMALL, Digest, fold, quick_sums
from lockstep.watch.signed_sums import signed_sums, stacked


@dataclass
class Seen:
    """What a pass of one micro-batch has computed on this rank."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    """By head, detached."""
    small: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of few elements by name of the parameter."""
    total: list[Tensor] = field(default_factory=list)
    """Digests of the others, which are released."""
    norms: list[Tensor] = field(default_factory=list)
    """2-norms of the others."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """`signed_sums` of the gradients by name, if wanted: summed over the micro-batches of a step."""
    each: dict[str, Tensor] = field(default_factory=dict)
    """Digests of the gradients by name, if wanted."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Of the gradients."""

    def gradient(self, device: torch.device) -> Tensor:
        """The digest of all gradients together: two int64."""
        small = {name: self.small[name] for name in self.sizes if name in self.small}  # in this order on all ranks
        parts = [torch.zeros(2, dtype=torch.int64), *([fold(small)] if small else []), *self.total]
        return torch.stack([part.to(device) for part in parts]).sum(0)

    def norm(self) -> float:
        """The 2-norm of all gradients together. Waits for the device."""
        norms = [*(one.norm().double() for one in self.small.values()), *self.norms]
        return float(torch.stack([norm.abs() for norm in norms]).norm()) if norms else 0.0

    def loss(self, device: torch.device) -> Tensor:
        """The digest of the losses: two int64."""
        return fold({head: value.reshape(1).to(device) for head, value in sorted(self.losses.items())}).to(device)

    def detailed(self) -> Detail:
        """The same on the host, by head and by parameter. `each` and `sums` must be wanted."""
        host = torch.device("cpu")
        pairs = torch.stack(list(self.each.values())).tolist() if self.each else []
        return Detail(
            {head: float(value) for head, value in sorted(self.losses.items())},
            {name: (a, b) for name, (a, b) in zip(self.each, pairs, strict=True)},
            dict(zip(self.sums, stacked(list(self.sums.values())), strict=True)),
            {name: float(torch.finfo(of).eps) for name, of in self.dtypes.items()},
            tuple(torch.cat([self.loss(host), self.gradient(host)]).tolist()),
        )


@dataclass(frozen=True)
class Detail:
    """The results of a pass, on the host: it can be sent between ranks."""

    losses: dict[str, float]
    gradients: dict[str, Digest]
    """Digests by name of the parameter."""
    sums: dict[str, list[float]]
    """`signed_sums` of the gradients by name."""
    eps: dict[str, float]
    """Relative rounding of the gradients' number formats."""
    folded: tuple[int, ...]
    """Digests of all losses and of all gradients, as a check compares them."""
    batch: Digest = (0, 0)
    """Digest of the inputs."""


def bare(folded: Sequence[int], batch: Sequence[int] = (0, 0)) -> Detail:
    """What a check knows about a result: only digests."""
    return Detail({}, {}, {}, {}, folded=tuple(folded), batch=(batch[0], batch[1]))


@contextlib.contextmanager
def watched(
    forward: nn.Module, leaves: Mapping[str, Tensor], *, sums: Collection[str] = (), each: bool = False, ranks: int
) -> Generator[Seen, None, None]:
    """Inside, the first forward pass and its backward pass are recorded. Their `sums` add up over later passes.

    Args:
        forward: the `Forward` of the strategy.
        leaves: the parameters by name, see `Strategy.leaves`.
        ranks: of the training. A single rank compares with itself.
    """
    seen = Seen(sizes={name: leaf.numel() for name, leaf in leaves.items()})
    passes = 0

    def begin(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def end(_: Any, __: Any, losses: Any) -> None:
        if passes == 1 and isinstance(losses, dict):
            seen.losses = {head: value.detach() for head, value in losses.items()}

    def look(name: str, gradient: Tensor) -> None:
        if name in sums:
            found = signed_sums(gradient)
            seen.sums[name] = seen.sums[name] + found if name in seen.sums else found
        if passes != 1:
            return
        seen.dtypes[name] = gradient.dtype
        if each:
            seen.each[name] = fold({name: gradient})
        if gradient.numel() <= SMALL:
            seen.small[name] = gradient.detach().clone()  # the gradient itself is clipped in place
        else:
            seen.total.append(fold({name: quick_sums(gradient) if ranks == 1 else gradient}))
            seen.norms.append(gradient.detach().norm().double())

    hooked: list[tuple[str, Any]] = list(leaves.items())
    handles: list[Any] = [leaf.register_hook(partial(look, name)) for name, leaf in hooked]
    handles += [forward.register_forward_pre_hook(begin), forward.register_forward_hook(end)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
