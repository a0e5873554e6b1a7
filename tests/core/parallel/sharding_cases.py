"""What tests of sharding run on ranks: importable functions that return plain values."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import LockstepError
from lockstep.configs import config_file
from lockstep.core import run_model
from lockstep.core.blocks import find_blocks
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.parallel import meta_init, sharded_tensor
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.gradients import clip_grads, grad_norm
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import join_world
from tests import own_tasks, runs
from tests.core.checkpoint import cases

# ---- models


class Tied(nn.Module):
    """Parameters that are tied within the root, and one that its own module has twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.one = self.other = nn.Parameter(torch.randn(5))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Few(nn.Module):
    """Parameters of fewer rows than ranks, and of none."""

    def __init__(self):
        super().__init__()
        self.single, self.pair, self.deep = (nn.Parameter(torch.randn(shape)) for shape in ((1,), (2, 3), (1, 2, 3, 4)))
        self.none = nn.Parameter(torch.empty(0, 3))


class Buffers(nn.Module):
    """Buffers of every kind that travels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        for number, tensor in enumerate(self.tensors()):
            self.register_buffer(f"buffer{number}", tensor, persistent=number % 2 == 0)
        self.register_buffer("nothing", None)
        self.again = nn.Module()
        self.again.register_buffer("buffer0", self.buffer0)

    def tensors(self):
        drawn = torch.randn(6, 4)
        yield from (
            drawn > 0,
            (drawn * 9).long(),
            (drawn * 9).int(),
            (drawn * 9).to(torch.uint8),
            drawn.half(),
            drawn.bfloat16(),
            drawn.double(),
        )
        yield from (
            drawn.t(),
            drawn[::2],
            torch.empty(0, 3),
            drawn[0, 0].clone(),
            (drawn[0, 1] * 9).long(),
            torch.complex(drawn, drawn),
            drawn[:1].expand(3, 4),
        )


class Narrow(nn.Module):
    """Buffers of types that gloo does not know."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        for number, dtype in enumerate((torch.int16, torch.uint16, torch.float8_e4m3fn)):
            self.register_buffer(f"buffer{number}", (torch.randn(5).abs() * 9).to(dtype))


class Reads(nn.Module):
    """Looks at its own values while it is made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


class Keeps(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self, where="attribute"):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        table = torch.arange(3.0)
        if where == "attribute":
            self.inner.table = table
        else:
            self.inner.tables = [table] if where == "list" else {"one": (table,)}


class Tagged(nn.Module):
    """Parameters and buffers with attributes of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.weight.tag = "kept"
        self.register_buffer("table", torch.randn(3))
        self.table.tag = "kept too"


def deep(dtype=torch.float32, frozen=()):
    return own_tasks.Deep(dtype=dtype, blocks=2, frozen=frozen).model()


MAKERS = {
    "deep": deep,
    "float64": lambda: deep(torch.float64),
    "bfloat16": lambda: deep(torch.bfloat16),
    "frozen": lambda: deep(frozen=("inner", "blocks.0", "scale")),
    "tied": Tied,
    "few rows": Few,
    "buffers": Buffers,
    "reads": Reads,
    "keeps": Keeps,
    "tagged": Tagged,
}
TROUBLES = {"narrow": Narrow, "keeps list": lambda: Keeps("list"), "keeps dict": lambda: Keeps("dict")}


def contents(model):
    """Everything that a model is: by name whether it is trained, and its bits; which names are one tensor."""
    tensors = list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers(remove_duplicate=False))
    numbers = {}
    same = {name: numbers.setdefault(id(tensor), len(numbers)) for name, tensor in tensors}
    bits = {name: cases.bits(sharded_tensor.gather(tensor.detach()).resolve_conj()) for name, tensor in tensors}
    return bits, {name: tensor.requires_grad for name, tensor in tensors}, same, list(model.state_dict())


# ---- on ranks


class Largest(TorchDispatchMode):
    """The most bytes of any storage that was made or seen, without those of pickles."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if (
                isinstance(one, torch.Tensor)
                and not sharded_tensor.is_sharded(one)
                and not one.is_meta
                and one.dtype != torch.uint8
            ):
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return made


def build_each(makers, options, chunk):
    """For each maker what was made, as `contents`, what was told, and the memory it took; or the error."""
    usual, meta_init._MESSAGE_BYTES = meta_init._MESSAGE_BYTES, chunk
    try:
        return _build_each(makers, options)
    finally:
        meta_init._MESSAGE_BYTES = usual


def _build_each(makers, options):
    answers = {}
    with join_world("cpu") as world:
        for name in makers:
            torch.manual_seed(world.rank)  # only rank 0 has the right values
            try:
                with Largest() as largest:
                    strategy = FSDP(world, options)
                    model, told = strategy.build_model((MAKERS | TROUBLES)[name])
                    held = len(strategy._values)
                    strategy.wrap(Forward(model, None), list(find_blocks(model).values()))
                answers[name] = {
                    "contents": contents(model),
                    "told": told,
                    "held": (held, len(strategy._values)),
                    "largest": largest.bytes,
                    "local": {
                        key: sharded_tensor.local(p.detach()).untyped_storage().nbytes()
                        for key, p in model.named_parameters()
                    },
                    "rows": {key: sharded_tensor.local_shard(p) for key, p in model.named_parameters()},
                    "tags": [getattr(tensor, "tag", None) for tensor in (*model.parameters(), *model.buffers())],
                    "meta": any(
                        tensor.is_meta for tensor in (*strategy.forward.parameters(), *strategy.forward.buffers())
                    ),
                }
                answers[name]["rows"] = {
                    key: (rows.start, len(rows.local), rows.writer) for key, rows in answers[name]["rows"].items()
                }
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
    return answers


def build_unlike():
    """Models that differ between ranks, and one that cannot be made on some rank: the errors."""

    def wider():
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 3 + (int(os.environ["RANK"]) == 1)))

    def retyped():
        return nn.Linear(3, 3, dtype=torch.float64 if os.environ["RANK"] == "2" else None)

    def longer():
        return nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + int(os.environ["RANK"]))])

    answers = []
    with join_world("cpu") as world:
        for make in (wider, retyped, longer):
            try:
                FSDP(world, ParallelConfig()).build_model(make)
                answers.append(None)
            except LockstepError as error:
                answers.append(str(error))
    return answers


def sharded(make, world, options=None, dtype=torch.float64, seed=0):
    """A strategy whose model has the same values on any number of ranks, sharded, and the whole model."""
    strategy = FSDP(world, options or ParallelConfig())
    torch.manual_seed(seed)
    model, _ = strategy.build_model(lambda: make().to(dtype))
    torch.manual_seed(seed)
    whole = make().to(dtype)
    strategy.wrap(Forward(model, None), list(find_blocks(model).values()))
    return strategy, whole


def spread(options):
    """Of every parameter and of new tensors spread like it: whether rows, `like` and `gather` fit together."""
    answers = {}
    with join_world("cpu") as world:
        for make in (deep, Few):
            strategy, whole = sharded(make, world, options)
            model = strategy.unwrapped.model
            for (name, parameter), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
                rows = sharded_tensor.local_shard(parameter)
                doubled = sharded_tensor.like(rows.local * 2, parameter)
                again = sharded_tensor.local_shard(doubled)
                answers[name] = (
                    torch.equal(rows.local, plain[rows.start : rows.start + len(rows.local)]),
                    rows.shape == plain.shape,
                    torch.equal(sharded_tensor.gather(doubled), plain * 2),
                    torch.equal(sharded_tensor.gather(parameter.detach()), plain),
                    (again.start, again.shape, again.local.data_ptr())
                    == (rows.start, rows.shape, doubled.to_local().data_ptr()),
                    sharded_tensor.local(parameter.detach()).data_ptr() == rows.local.data_ptr(),
                )
    return answers


def save_sharded(folder, options):
    """A checkpoint of a sharded model, written by all ranks."""
    with join_world("cpu") as world:
        strategy, whole = sharded(deep, world, options)
        strategy_few, whole_few = sharded(Few, world, options, seed=1)
        model, few = strategy.unwrapped.model, strategy_few.unwrapped.model
        saver = Saver(Path(folder), world, CheckpointConfig(), tell=print, in_background=False)
        saver.save(1, model.state_dict() | few.state_dict(), {}, cases.about(1))
        saver.finish()
        return {name: cases.bits(tensor) for name, tensor in (whole.state_dict() | whole_few.state_dict()).items()}


def norms_and_clips(options, clips):
    """Norm of gradients and what clipping makes of them, beside plain torch; for each model, dtype and limit."""
    answers = []
    with join_world("cpu") as world:
        for make in (deep, Few, lambda: nn.Linear(1, 1, bias=False)):
            for dtype in (torch.float64, torch.float32):
                strategy, whole = sharded(make, world, options, dtype)
                model = strategy.unwrapped.model
                for clip in clips:
                    give_gradients(model, whole)
                    parameters, plain = list(model.parameters()), list(whole.parameters())
                    norm = grad_norm(parameters)
                    clip_grads(parameters, clip, norm)
                    expected = nn.utils.clip_grad_norm_(plain, clip)
                    found = [sharded_tensor.gather(p.grad) for p in parameters if p.grad is not None]
                    pairs = list(zip(found, [p.grad for p in plain if p.grad is not None], strict=True))
                    apart = max(float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs)
                    answers.append((str(dtype), float(norm), float(expected), apart, str(norm.dtype), norm.ndim))
        for parameter in parameters:
            parameter.grad = None
        none = float(grad_norm(parameters))
    return answers, none


def give_gradients(model, whole):
    """The same gradients to both; the second parameter gets none."""
    torch.manual_seed(3)
    for number, (parameter, plain) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
        plain.grad = None if number == 1 else torch.randn_like(plain)
        rows = sharded_tensor.local_shard(parameter)
        parameter.grad = (
            None
            if number == 1
            else sharded_tensor.like(plain.grad[rows.start : rows.start + len(rows.local)].clone(), parameter)
        )


class Overflows(own_tasks.Plain):
    """One row's gradient is too large for the first loss scales: only one rank's shard has it."""

    def __init__(self, row):
        super().__init__(dtype=torch.float32)
        self.row = row

    def loss(self, model, batch):
        small = model[0].weight[self.row, 0].half() * torch.tensor(50.0, dtype=torch.float16)
        return super().loss(model, batch) + small.float() * (len(batch[0]) > 0)


def train_overflowing(rows, parallel):
    """Weights, and how many steps were skipped, for tasks whose overflow is in another row each."""
    answers = []
    for row in rows:
        settings = runs.config(
            batch={"micro": 12},
            precision="fp16",
            optim={"lr": 1e-3},
            parallel=parallel,
            train={"steps": 14},
            log={"every_steps": 1},
        )
        weights, results = runs.fit(Overflows(row), settings)
        answers.append((weights, results["train/skipped"], results["train/loss_scale"]))
    return answers


class Matrices(own_tasks.Plain):
    """For optimizers that take nothing but matrices."""

    def model(self):
        self.built = nn.Sequential(nn.Linear(10, 16, bias=False), nn.Tanh(), nn.Linear(16, 5, bias=False)).double()
        return self.built


def train_each(optimizers):
    """Final weights for each optimizer, or the name of the error; a task by name with each."""
    answers = []
    for kind, section in optimizers:
        settings = runs.config(batch={"micro": 12}, parallel={"strategy": "fsdp"}, train={"steps": 5})
        settings["optim"] = section
        try:
            answers.append(runs.fit(TASKS[kind](), settings)[0])
        except LockstepError as error:
            answers.append(str(error))
    return answers


TASKS = {"Deep": own_tasks.Deep, "Matrices": Matrices}


def stay_again(groups_before):
    """Weights that a sharded model ends with, in stays of one process that each made so many other groups before it."""
    found = []
    for count in groups_before:
        with join_world("cpu") as world:
            for _ in range(count):
                dist.new_group()
            config = config_file.parse(runs.config(parallel={"strategy": "fsdp", "shard_ranks": 1}), needs_task=False)
            made = run_model.build_model(config, own_tasks.Deep(), world, steps_per_epoch=10)
            found.append(
                {
                    name: sharded_tensor.gather(tensor.detach()).clone()
                    for name, tensor in made.strategy.unwrapped.model.state_dict().items()
                }
            )
    return found
