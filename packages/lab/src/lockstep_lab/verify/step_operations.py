"""The operations of one training step: their collectives, and where the host waits for the device.

No other module of the package uses the names of torch's collective operators.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lockstep
from lockstep.core import devices
from lockstep.core.parallel.pretended import pretended_world
from lockstep.parts.operations import Observer, caller, name_of, place_of

_VERIFY = str(Path(__file__).parent)
_PACKAGE = str(Path(lockstep.__file__).parent)
_DISTRIBUTED = f"{_PACKAGE}/core/parallel"  # its reductions count units and compute norms
_AGREEMENT = f"{_DISTRIBUTED}/signals.py"
_HOST_WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_REDUCTIONS = {  # by operator, the position of the argument that holds its input tensors
    "c10d::allreduce_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::allreduce_coalesced_": 0,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
}
_PRODUCTS = ("matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "cdist", "cosine_similarity")
_ORDERS = {  # by operation, the position of the argument `dim`, and its default
    "sort": (1, -1),
    "argsort": (1, -1),
    "msort": (1, 0),
    "topk": (2, -1),
    "cumsum": (1, None),
    "logcumsumexp": (1, None),
}


@dataclass
class StepCommunication:
    """The collectives of one step on one rank, and where its host waited for the device."""

    reductions: list[int] = field(default_factory=list)
    """Number of elements of each reduction in the forward and backward passes."""
    own_reductions: list[int] = field(default_factory=list)
    """The same for reductions by the package itself, to count units or to compute a norm."""
    reductions_of_integers: list[int] = field(default_factory=list)
    """The same for reductions of integers. With `find_unused_parameters`, DDP adds up which parameters ranks used."""
    other_collectives: list[str] = field(default_factory=list)
    """Names of all other collectives."""
    broadcast_bytes: int = 0
    host_waits: list[tuple[str, bool]] = field(default_factory=list)
    """Where the host read a value from the device: (file and line, whether the file belongs to the package)."""


class StepOperations(Observer):
    """Inside, every operation of this thread and of its backward passes is recorded.

    Args:
        optimizer: operations inside its `step` are not counted, because torch's optimizers read their counters.
        device: reports waits that no operation shows, such as copies of unpinned memory, if it can.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: devices.Device | None = None) -> None:
        super().__init__()
        self._watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if device is not None:
            self._watched = device.watched_waits(self._note_wait)
        self.communication = StepCommunication()
        self._in_optimizer = False
        self._handles = [
            optimizer.register_step_pre_hook(self._enter_optimizer),
            optimizer.register_step_post_hook(self._leave_optimizer),
        ]

    def _enter_optimizer(self, *_: Any) -> None:
        self._in_optimizer = True

    def _leave_optimizer(self, *_: Any) -> None:
        self._in_optimizer = False

    def _note_wait(self) -> None:
        if not self._in_optimizer:
            self.communication.host_waits.append(place_of_caller())

    def __enter__(self) -> StepOperations:
        self._watched.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._watched.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._in_optimizer:
            self._record_communication(name_of(func), args)

    def _record_communication(self, name: str, args: Sequence[Any]) -> None:
        communication = self.communication
        if name in _REDUCTIONS:
            tensors = args[_REDUCTIONS[name]]
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            frame = caller((_VERIFY,))
            is_backward = frame.f_code.co_name == "backward"  # of a strategy: it exchanges gradients
            own = str(Path(frame.f_code.co_filename).parent) == _DISTRIBUTED and not is_backward
            if own and _is_of_no_step(frame):
                return
            reductions = communication.own_reductions if own else communication.reductions
            if not own and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
                reductions = communication.reductions_of_integers
            reductions.append(sum(tensor.numel() for tensor in tensors))
        elif name.startswith("c10d::"):
            if name == "c10d::broadcast_":
                communication.broadcast_bytes += sum(tensor.nbytes for tensor in args[0])
            communication.other_collectives.append(name.removeprefix("c10d::").strip("_"))
        elif name in _HOST_WAITS:
            communication.host_waits.append(place_of_caller())


class RandomOperations(Observer):
    """Inside, the names of operations that draw from a torch generator are recorded.

    Args:
        wanted: whether to examine the next operation.
    """

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.names: list[str] = []
        self.places: list[str] = []
        """File and line of each operation that changed the state of the CPU's global generator. On other devices, of
        each operation that may draw."""
        self.lines: list[str] = []
        """The text of these lines."""
        self._wanted = wanted

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._wanted():
            return func(*args, **kwargs)
        self.names.append(name_of(func).removeprefix("aten::"))
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        on_cpu = not isinstance(result, Tensor) or result.device.type == "cpu"
        if not on_cpu or not bool((before == torch.default_generator.get_state()).all()):
            frame = caller((_VERIFY,))
            self.places.append(f"{self.names[-1]} at {place_of(frame)}")
            self.lines.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        return result


class RepeatedDraws(Observer):
    """Inside, a pass over some samples of a batch draws the numbers that the pass over the whole batch drew for them.

    Args:
        places: of the samples in the batch.
        whole: what the pass over the whole batch drew; None: this is that pass.
    """

    def __init__(self, places: Sequence[int], whole: RepeatedDraws | None = None) -> None:
        super().__init__()
        self.places, self.whole = list(places), whole
        self.failed: bool = whole is not None and whole.failed
        self.drawn: list[Tensor] = []

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        if torch.equal(before, torch.default_generator.get_state()):  # such as attention without dropout
            return result
        self.failed |= not isinstance(result, Tensor)
        self.drawn.append(result.clone() if isinstance(result, Tensor) else result)
        if self.whole is None or self.failed:
            return result
        value = self.whole.drawn[len(self.drawn) - 1] if len(self.drawn) <= len(self.whole.drawn) else torch.empty(0)
        if value.shape != result.shape and value.shape[:1] == (len(self.whole.places),):
            value = value[self.places]
        self.failed = value.shape != result.shape
        return result if self.failed else result.copy_(value)


class CoarseOperations(Observer):
    """Inside, operations are found whose result has a coarser number format than one of their inputs.

    A model in float64 may compute its norms, positions or softmax in float32. A constant in float32 rounds nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        """Relative rounding of the coarsest of these results; 0 if there is none."""
        self.words = ""
        """Its number format, and the file and line of the operation."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [_rounding_of(tensor) for tensor in _tensors_in((args, kwargs))]
        finest = min(given, default=0.0)  # before the operation, which may write into an input
        result = func(*args, **kwargs)
        name = name_of(func)
        rounds = finest and not name.endswith("_like") and not name.startswith("aten::new_")  # these read no value
        for tensor in _tensors_in(result) if rounds else ():
            epsilon = _rounding_of(tensor)
            if epsilon > max(finest, self.epsilon):
                self.epsilon = epsilon
                self.words = f"{str(tensor.dtype).removeprefix('torch.')} at {place_of_caller()[0]}"
        return result


def _rounding_of(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps)


def _tensors_in(value: Any) -> list[Tensor]:
    """The floating-point or complex tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inner for tensor in _tensors_in(item)]


class CollectiveOperations(Observer):
    """Inside, the names of collectives are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        space, _, name = name_of(func).partition("::")
        if space in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.names.append(name.strip("_"))


class ComparingOperations(TorchFunctionMode):
    """Inside, operations that compare the samples of a batch with each other are recorded.

    They either order the samples (sort, topk, cumsum along the batch), or their result has a number for each pair of
    samples: matrix products, distances, and operations that combine a tensor with itself, such as
    `labels[:, None] == labels`. Outputs that are combined with labels are not recorded: there, an output of shape
    (N, 1) and labels of shape (N,) make pairs by mistake.

    Args:
        samples: in the batch.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.is_paused = samples, False
        self.found: list[tuple[str, str, int]] = []
        """Name of the operation, its file and line, and how many rows each sample has."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        if self.is_paused:
            return result
        name = str(getattr(func, "__name__", "")).strip("_")
        if name in _ORDERS and args and isinstance(args[0], Tensor) and args[0].ndim:
            place, default = _ORDERS[name]
            given = options.get("dim", args[place] if len(args) > place else default)
            size = args[0].shape[given] if isinstance(given, int) and not isinstance(given, bool) else 0
            sides = [size // self.samples] if size and size % self.samples == 0 else []
        else:
            sides = self._sides_of_pairs(name, args, result)
        if sides:
            self.found.append((name, place_of_caller()[0], sides[0]))
        return result

    def _sides_of_pairs(self, name: str, args: Sequence[Any], result: Any) -> list[int]:
        """The rows of each sample in a result for each pair of samples; empty for other results."""
        if not isinstance(result, Tensor) or result.ndim < 2:
            return []
        operands = [value.data_ptr() for value in args if isinstance(value, Tensor)]
        if name not in _PRODUCTS and len(set(operands)) == len(operands):
            return []
        sides = [size // self.samples for size in result.shape if size and size % self.samples == 0]
        return [side for side in sides if sides.count(side) > 1]


@contextlib.contextmanager
def pretended_ranks(size: int) -> Iterator[CollectiveOperations]:
    """Inside, this process is rank 0 of `size` ranks. Collectives are recorded, and communicate with nobody."""
    operations = CollectiveOperations()
    with pretended_world(size) as is_pretended, operations if is_pretended else contextlib.nullcontext():
        yield operations


def _is_of_no_step(frame: FrameType | None) -> bool:
    """True for collectives that agree on stopping (once a second, so in each slow step), or on shapes of buffers.

    The latter happens only in the first steps of a process.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED):
        if frame.f_code.co_filename == _AGREEMENT or frame.f_code.co_name == "_agree_on_shapes":
            return True
        frame = frame.f_back
    return False


def place_of_caller() -> tuple[str, bool]:
    """File and line of the caller, and whether the file belongs to the engine."""
    frame = caller((_VERIFY,))
    return place_of(frame), frame.f_code.co_filename.startswith(f"{_PACKAGE}/")
