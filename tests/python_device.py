"""A device in Python, on which the paths of GPUs run without a GPU.

Its tensors lie in host memory and say that they are on `pygpu:0`. The device records every operation with its stream,
every read by the host, and the bytes that it holds, and it refuses more bytes than `limit`. Random operations draw from
a generator of its own. What the device cannot show: speed, real races between streams, and kernels of a GPU.

torch lets a process have a single device in Python, and the device then is "the accelerator" of this process. So tests
call `run(function, ...)`, which calls the function in a process that has the device; see `tests/ranks.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
import types
import warnings
import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

import lockstep
import lockstep_lab
import lockstep_recipes
from lockstep.core import devices
from lockstep.core.devices import Accelerator

NAME = "pygpu"
PACKAGES = tuple(f"{os.path.dirname(one.__file__)}{os.sep}" for one in (lockstep, lockstep_recipes, lockstep_lab))


def below(file):
    """The path of a file below its package."""
    return file.removeprefix(next(folder for folder in PACKAGES if file.startswith(folder)))


READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}
"""Operations whose result the host must wait for."""


class Operation(NamedTuple):
    """An operation that the device was given."""

    name: str
    """As torch's schema names it; `read` in front where the host waits for the result."""
    stream: int
    """0: the stream of the computation."""
    where: str
    """The line of Lockstep that asked for it."""


class Stream:
    """A queue. Operations run at once; the stream records their order."""

    def __init__(self, device=None, priority=0):
        DEVICE.streams += 1
        self.number = DEVICE.streams

    def wait_stream(self, other):
        DEVICE.note(f"wait_stream {other.number}")

    def wait_event(self, event):
        DEVICE.note(f"wait_event {event.number}")

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        DEVICE.note(f"read stream {self.number}")


class Event:
    """A place in a queue."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        DEVICE.events += 1
        self.number = DEVICE.events

    def record(self, stream=None):
        self.time_s = DEVICE.clock()
        DEVICE.note(f"record_event {self.number}")

    def wait(self, stream=None):
        DEVICE.note(f"wait_event {self.number}")

    def query(self):
        return True

    def synchronize(self):
        DEVICE.note(f"host_waits_for_event {self.number}")

    def elapsed_time(self, other):
        return 1000 * (other.time_s - self.time_s)


class PythonDevice:
    """The state of the device, and the functions that torch.cuda has."""

    def __init__(self):
        self.streams = self.events = 0
        self.log: list[Operation] = []
        self.held: Counter[int] = Counter()  # tensors by address of their storage
        self.bytes = self.most = 0
        self.limit: int | None = None
        """Bytes that fit. None: any number."""
        self.clock = time.perf_counter
        """Seconds at which an event is recorded, as the device tells them."""
        self.generator = torch.Generator()
        self.default_stream = None
        self.stream_now = None
        self.at_shortage = []
        """Called before an error about too little memory."""
        self.listener = None
        """Is called at each read by the host."""

    # ---- what tests use

    def reads(self):
        """The reads by the host since the log was cleared: name and line of each."""
        return [(one.name.removeprefix("read "), one.where) for one in self.log if one.name.startswith("read ")]

    def note(self, name):
        frames = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(PACKAGES) and "/devices/" not in below(frame.filename)
        ]
        if self.listener is not None and name.startswith("read "):
            self.listener()
        where = f"{below(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        self.log.append(Operation(name, self.stream_now.number if self.stream_now else 0, where))

    def keep(self, tensor, host):
        """Count the bytes of a tensor for as long as it lives."""
        storage = host.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        if not self.held[address]:
            if self.limit is not None and self.bytes + size > self.limit:
                for call in self.at_shortage:
                    call()
                raise torch.OutOfMemoryError(f"{NAME}: out of memory. Tried to allocate {size} bytes")
            self.bytes += size
            self.most = max(self.most, self.bytes)
        self.held[address] += 1
        weakref.finalize(tensor, self._let_go, address, size)

    def _let_go(self, address, size):
        self.held[address] -= 1
        if not self.held[address]:
            del self.held[address]
            self.bytes -= size

    # ---- what torch's modules of devices have

    def module(self):
        module = types.ModuleType(f"torch.{NAME}")
        names = [name for name in dir(self) if not name.startswith("_")]
        for name in names:
            if callable(getattr(self, name)):
                setattr(module, name, getattr(self, name))
        module.Stream, module.Event = Stream, Event
        module.default_generators = [self.generator]
        module._is_in_bad_fork = lambda: False
        module._initialized = True  # torch.utils.checkpoint asks, before it keeps the state of the generator
        return module

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    @contextlib.contextmanager
    def device(self, device):
        yield

    def set_device(self, device):
        self.note("set_device")

    def get_device_name(self, device=None):
        return "device in Python"

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)

    def synchronize(self, device=None):
        self.note("read synchronize")

    def current_stream(self, device=None):
        return self.stream_now or self.default_stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def memory_allocated(self, device=None):
        return self.bytes

    def max_memory_allocated(self, device=None):
        return self.most

    def max_memory_reserved(self, device=None):
        return self.most

    def reset_peak_memory_stats(self, device=None):
        self.most = self.bytes

    def empty_cache(self):
        self.note("empty_cache")


DEVICE = PythonDevice()


class PythonTensor(torch.Tensor):
    """A tensor of the device. `host` holds its values."""

    @staticmethod
    def __new__(cls, host, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        tensor.host = host
        DEVICE.keep(tensor, host)
        return tensor

    def __repr__(self, **_):
        return f"PythonTensor({self.host})"

    def untyped_storage(self):
        return self.host.untyped_storage()

    def tolist(self):
        """torch reads a tensor of a subclass in no other way than by single numbers."""
        DEVICE.note("read tolist")
        return self.host.tolist()

    def record_stream(self, stream):
        DEVICE.note(f"record_stream {stream.number}")

    def __setitem__(self, index, value):
        """For CUDA, torch makes a number a tensor of the host, and copies it to the device: the host waits."""
        parts = index if isinstance(index, tuple) else (index,)
        by_places = any(
            isinstance(part, torch.Tensor) and part.dtype not in (torch.bool, torch.uint8) for part in parts
        )
        if by_places and not isinstance(value, torch.Tensor):
            DEVICE.note("read index_put_ of a number")
        super().__setitem__(index, value)

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), options=None):
        return _run(function, arguments, options or {})


def _host(value):
    return value.host if isinstance(value, PythonTensor) else value


def _run(function, arguments, options):
    name = function._schema.name
    target = options.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    copies = name == "aten::copy_" and not isinstance(arguments[0], PythonTensor)
    waits = name in READS or (
        (copies or (name == "aten::_to_copy" and to_host)) and not _non_blocking(arguments, options)
    )
    DEVICE.note(f"read {name}" if waits else name)
    if name in ("aten::cat", "aten::stack"):
        _check_same_device(arguments)
    hosts = pytree.tree_map(_host, options)
    if target is not None:
        hosts["device"] = torch.device("cpu")
    with _own_generator() if torch.Tag.nondeterministic_seeded in function.tags else contextlib.nullcontext():
        result = function(*pytree.tree_map(_host, arguments), **hosts)
    if function._schema.is_mutable and isinstance(result, torch.Tensor):
        for given in pytree.tree_leaves((arguments, options)):
            if isinstance(given, torch.Tensor) and _host(given) is result:
                return given
    if to_host:
        return result
    return pytree.tree_map(lambda value: PythonTensor(value) if isinstance(value, torch.Tensor) else value, result)


def _check_same_device(arguments):
    """Raises where tensors of the host and of the device are put together, as torch does on a GPU."""
    kinds = {value.device for value in pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)}
    if len(kinds) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, kinds))}")


def _non_blocking(arguments, options):
    """Whether a copy may end after the call. Of `copy_`, it is the third argument."""
    return bool(options.get("non_blocking", len(arguments) > 2 and arguments[2]))


@contextlib.contextmanager
def _own_generator():
    """Inside, the host's generator has the state of the device's."""
    before = torch.get_rng_state()
    torch.set_rng_state(DEVICE.generator.get_state())
    try:
        yield
    finally:
        DEVICE.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return PythonTensor(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return PythonTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _arange(*arguments, dtype=None, **_):
    """torch's own makes an empty tensor and resizes it, which a wrapper of a tensor cannot follow."""
    DEVICE.note("aten::arange")
    return PythonTensor(torch.arange(*arguments, dtype=dtype))


def _collective(name):
    """The kernel of a collective: that of the CPU, with the memory that the tensors lie in. Ranks need gloo alone."""

    def kernel(*arguments):
        DEVICE.note(f"collective {name}")
        result = getattr(torch.ops.c10d, name)(*pytree.tree_map(_host, arguments))
        return (arguments[0], result[1])

    return kernel


def _pin_memory(tensor, device=None):
    DEVICE.note("pin_memory")
    # torch copies into memory with the same strides.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def install():
    """Give this process the device. Returns it, with an empty log and no limit."""
    if DEVICE.default_stream is None:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, backend_module=DEVICE.module())
        DEVICE.default_stream = Stream()
        DEVICE.default_stream.number = 0
        DEVICE.library = torch.library.Library("aten", "IMPL")
        DEVICE.library.impl("empty_strided", _empty_strided, "PrivateUse1")
        DEVICE.library.impl("empty.memory_format", _empty, "PrivateUse1")
        for name in ("arange", "arange.start", "arange.start_step"):
            DEVICE.library.impl(name, _arange, "PrivateUse1")
        for name in _IN_16_BITS + _IN_32_BITS:
            DEVICE.library.impl(name, _autocast(name), "AutocastPrivateUse1")
        DEVICE.fallback = torch.library.Library("_", "IMPL")  # other operations keep the number formats
        DEVICE.fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        DEVICE.collectives = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has kernels for such devices, which look for a backend of them
            for name in ("allreduce_", "broadcast_", "allgather_", "_allgather_base_"):
                DEVICE.collectives.impl(name, _collective(name), "PrivateUse1")
        torch.Tensor.pin_memory = _pin_memory  # torch has no pinned memory for a device in Python
        devices.register(NAME, PythonGpu)
    DEVICE.log.clear()
    DEVICE.limit = None
    DEVICE.clock = time.perf_counter
    return DEVICE


class PythonGpu(Accelerator):
    """The adapter of the device: that of GPUs, with the functions above in place of torch.cuda's."""

    group_backend = "gloo"

    def identity(self):
        return f"device in Python of rank {os.environ.get('RANK', 0)}"

    def near_cpus(self, binding):
        return contextlib.nullcontext()

    def why_no_bf16(self):
        return None

    @contextlib.contextmanager
    def watched_waits(self, note):
        DEVICE.listener = note
        try:
            yield
        finally:
            DEVICE.listener = None

    def host_buffer(self, size):
        DEVICE.note(f"host_buffer {size}")
        return torch.empty(size, dtype=torch.uint8)

    @contextlib.contextmanager
    def snapshot_at_shortage(self, file):
        DEVICE.at_shortage.append(lambda: file.parent.mkdir(exist_ok=True) or file.write_text(str(DEVICE.bytes)))
        try:
            yield
        finally:
            DEVICE.at_shortage.clear()

    def libraries(self):
        return {"gpus": [self.name()]}

    def profiled(self):
        return [torch.profiler.ProfilerActivity.CPU]


_IN_16_BITS = ("linear", "matmul", "addmm", "mm", "bmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
_IN_32_BITS = (
    "softmax.int",
    "log_softmax.int",
    "cross_entropy_loss",
    "layer_norm",
    "group_norm",
    "nll_loss",
    "exp",
    "log",
)


def _autocast(name):
    """The kernel of an operation under autocast: it changes the number format of its arguments, as on a GPU."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*arguments, **options):
        dtype = torch.get_autocast_dtype(NAME) if name in _IN_16_BITS else torch.float32

        def cast(value):
            can_change = isinstance(value, PythonTensor) and value.dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            )
            return value.to(dtype) if can_change else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*pytree.tree_map(cast, arguments), **pytree.tree_map(cast, options))

    return kernel
