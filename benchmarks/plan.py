"""`lockstep plan` compared with real trainings on the CPU: states, activations and peak of one rank, in bytes of
tensors.

    python benchmarks/plan.py [--models bert,resnet,vit,segformer,gpt2] [--ranks 1,2] [--json FILE]
    python benchmarks/plan.py --more --models small --ranks 1,2,4    # precisions, accumulation, averages, hybrid
    python benchmarks/plan.py --more --real FILE        # with the real bytes of an earlier --json FILE
    python benchmarks/plan.py --large       # the time and the memory of planning a model of 7 billion parameters

Real figures come from the second step of `core.step.train_step` in a new process per rank. It shares no code with the
estimate:

states       bytes of the storages of all tensors when the update begins, without data and batch
activations  bytes that malloc has allocated when the first backward pass begins, minus those when the step began.
             With FSDP, without the gathered parameters outside the blocks
peak         bytes of storages when the step began, plus the maximum that malloc allocated beyond, checked after
             each operation. Memory of gloo's threads also counts
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
from harness import free_port
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from lockstep.core.config.sections import RunConfig
from lockstep.core.task import Task

SAMPLES = {"small": 4, "bert": 4, "resnet": 2, "vit": 2, "segformer": 2, "gpt2": 2}  # of a micro-batch
BOUNDS = {"states": 0.01, "activations": 0.10, "peak": 0.15}


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is trained."""

    strategy: str
    recompute: bool = False
    precision: str = "fp32"
    accumulate: int = 1
    """Micro-batches of a step."""
    shard_ranks: int | None = None
    param_dtype: str | None = None
    averages: bool = False
    """Moving averages of the weights (EMA)."""
    offload: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        words = ["hybrid" if self.shard_ranks else self.strategy, self.precision]
        words += [f"gathered in {self.param_dtype}"] if self.param_dtype else []
        words += [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        words += [word for word in ("averages", "offload") if getattr(self, word)]
        return ", ".join(words)


BASIC = {
    1: [Case("single", again) for again in (False, True)],
    2: [Case(name, again) for name in ("ddp", "fsdp") for again in (False, True)],
}
MORE = {
    1: [Case("single", precision="bf16"), Case("single", accumulate=2, averages=True)],
    2: [
        Case("ddp", precision="bf16"),
        Case("ddp", precision="fp16"),
        Case("ddp", accumulate=2, averages=True),
        Case("fsdp", precision="bf16"),
        Case("fsdp", True, precision="bf16"),
        Case("fsdp", precision="bf16", param_dtype="bf16"),
        Case("fsdp", True, precision="bf16", param_dtype="bf16", accumulate=2),
        Case("fsdp", accumulate=2, averages=True),
        Case("fsdp", offload=True),
    ],
    4: [
        Case("ddp"),
        Case("fsdp"),
        Case("fsdp", shard_ranks=2),
        Case("fsdp", True, precision="bf16", shard_ranks=2, averages=True),
        Case("fsdp", shard_ranks=2, accumulate=2),
    ],
}


class Pretend(Task):
    """A model of its real size on made-up samples."""

    def __init__(self, model: str) -> None:
        self.name = model

    def model(self) -> nn.Module:
        import transformers as hf

        if self.name == "small":  # fast in all precisions: CPUs compute fp16 slowly
            sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
            return hf.BertForSequenceClassification(hf.BertConfig(num_labels=4, vocab_size=8000, **sizes))
        if self.name == "bert":
            return hf.BertForSequenceClassification(hf.BertConfig(num_labels=4))
        if self.name == "resnet":
            return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))
        if self.name == "vit":
            return hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000))
        if self.name == "segformer":
            return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=20))
        return hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False))

    def train_data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        if self.name in ("small", "bert", "gpt2"):
            tokens = torch.randint(0, 8000, (32, 128), generator=draw)
            return TensorDataset(tokens, torch.randint(0, 4, (32,), generator=draw))
        side = {"resnet": 160, "vit": 224, "segformer": 192}[self.name]
        images = torch.randn(16, 3, side, side, generator=draw)
        shape = (16, side // 4, side // 4) if self.name == "segformer" else (16,)
        return TensorDataset(images, torch.randint(0, 20, shape, generator=draw))

    def loss(self, model, batch):
        inputs, targets = batch
        if self.name in ("small", "bert"):
            return cross_entropy(model(input_ids=inputs).logits, targets, reduction="sum")
        if self.name == "gpt2":
            logits = model(input_ids=inputs).logits[:, :-1]
            return cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="sum") / inputs.shape[1]
        logits = model(pixel_values=inputs).logits
        return cross_entropy(logits, targets, reduction="sum") / targets[0].numel()


def config_of(model: str, ranks: int, case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": model,
            "device": "cpu",
            "precision": case.precision,
            "batch": {"global": SAMPLES[model] * ranks * case.accumulate, "micro": SAMPLES[model]},
            "train": {"steps": 4, "ema_decay": 0.99 if case.averages else None},
            "parallel": {
                "strategy": case.strategy,
                "shard_ranks": case.shard_ranks,
                "param_dtype": case.param_dtype,
                "cpu_offload": case.offload,
            },
            "compute": {"activation_checkpointing": case.recompute},
        }
    )


# ---- the real training


def measure(model: str, ranks: int, cases: list[Case]) -> list[dict[str, float]]:
    """The figures of each case, of the rank with the largest peak."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = free_port()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, model, cases, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = []
    for _ in processes:
        figures = queue.get(timeout=1400)
        if isinstance(figures, str):  # a rank failed, and the others would wait for it
            for process in processes:
                process.terminate()
            raise RuntimeError(figures)
        found.append(figures)
    for process in processes:
        process.join()
    return [max(of_case, key=lambda figures: figures["peak"]) for of_case in zip(*found, strict=True)]


class Info(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
_mallinfo.restype = Info


def allocated() -> int:
    """Bytes that malloc has allocated in this process, in all threads."""
    info = _mallinfo()
    return info.uordblks + info.hblkhd


class Watch(TorchDispatchMode):
    """Records the allocated bytes after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, allocated())
        return result


def storages() -> int:
    """Bytes of the storages of all tensors that Python knows, and of their gradients."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    local = getattr(tensor, "_local_tensor", tensor)
                    storage = local.untyped_storage()
                    if not local.is_meta and storage.nbytes():
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _rank(rank: int, ranks: int, port: int, model: str, cases: list[Case], queue: object) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world:
        try:
            queue.put([_figures(world, model, case) for case in cases])
        except Exception:
            queue.put(traceback.format_exc())
            time.sleep(5)  # until the message has arrived


def _figures(world: object, model: str, case: Case) -> dict[str, float]:
    from lockstep.trainer import assemble

    print(f"{time.strftime('%H:%M:%S')} {model}, {world.size} ranks: {case.name}", file=sys.stderr, flush=True)
    config, task = config_of(model, world.size, case), Pretend(model)
    others = storages()
    prepared = assemble.in_memory(config, task, world).run
    data = sum(tensor.nbytes for tensor in prepared.batches.loader.micro_batches.data.tensors)
    micro_batches, samples = _next(prepared)
    prepared.update(prepared.state, micro_batches, samples)
    del micro_batches
    micro_batches, samples = _next(prepared)
    assert len(micro_batches) == case.accumulate
    batch = sum(tensor.nbytes for each in micro_batches for tensor in each.collated)
    root = root_bytes(prepared, case.shard_ranks or world.size, case) if prepared.state.strategy.is_sharded else 0
    figures, watch, backward = {}, Watch(), torch.autograd.backward

    def look(*_):
        figures["update"] = storages() - others - data - batch

    def begin_of_backward(*args, **options):
        figures.setdefault("forward", allocated())
        return backward(*args, **options)

    prepared.state.optimizer.register_step_pre_hook(look)
    figures["begin"] = storages() - others - data
    before = allocated()
    with watch, mock.patch.object(torch.autograd, "backward", begin_of_backward):
        prepared.update(prepared.state, micro_batches, samples)
    if case.strategy == "ddp":
        figures["begin"] = figures["update"] + batch  # the buckets always exist, and hold the gradients
    return {
        "states": figures["update"],
        "activations": figures["forward"] - before - root,
        "peak": figures["begin"] + watch.highest - before,
        **{f"at_{name}": value for name, value in figures.items()},
    }


def _next(prepared):
    found = next(iter(prepared.batches))
    micro_batches = found.micro_batches if hasattr(found, "micro_batches") else found
    return micro_batches, prepared.plan.samples(prepared.state.step)


def root_bytes(prepared, shards: int, case: Case) -> int:
    """Gathered parameters outside the blocks: their rows are padded to a multiple of the ranks."""
    blocks = tuple(f"{name}." for name in prepared.blocks)
    return sum(
        -(-p.shape[0] // shards) * shards * p[0].numel() * (2 if case.param_dtype else 4)
        for name, p in prepared.model.named_parameters()
        if not name.startswith(blocks)
    )


# ---- the estimate


def facts_of_case(model: str, case: Case):
    """The facts that the estimate of a case needs."""
    from lockstep_lab.plan.facts import facts_of

    config = config_of(model, 1, dataclasses.replace(case, strategy="single"))
    recompute = tuple({False, case.recompute})
    return facts_of(Pretend(model), config, device="cpu", precisions=(case.precision,), recompute=recompute)


def estimated(model: str, ranks: int, case: Case) -> dict[str, float]:
    from lockstep_lab.plan.estimate import estimate, pass_of
    from lockstep_lab.plan.inputs import Machines, Setting

    facts = facts_of_case(model, case)
    kind = "single" if ranks == 1 else "hybrid" if case.shard_ranks else case.strategy
    setting = Setting(
        Machines(ranks, case.shard_ranks or ranks),
        kind,
        case.precision,
        SAMPLES[model],
        case.accumulate,
        recompute=case.recompute,
        shard_ranks=case.shard_ranks,
        param_dtype=case.param_dtype,
    )
    memory = estimate(facts, setting).memory
    states = memory.states_bytes
    if case.offload:  # on the CPU, the memory of the host is the memory of the rank
        states = estimate(facts, dataclasses.replace(setting, offload=True)).memory.host_bytes + facts.buffers_bytes
    kept = pass_of(facts, setting).kept.at(SAMPLES[model])
    return {"states": states, "activations": kept, "peak": memory.peak_bytes, "parts": memory.at_peak}


def compare(models: list[str], cases: dict[int, list[Case]], real_rows: list[dict] | None) -> list[dict[str, object]]:
    rows = []
    for model in models:
        for ranks, of_all in cases.items():
            # On a CPU, torch has no batch normalisation of fp32 with weights of bf16.
            of_ranks = [case for case in of_all if not (case.param_dtype and model in ("resnet", "segformer"))]
            if real_rows is None:
                reals = measure(model, ranks, of_ranks)
            else:
                known = {(row["model"], row["ranks"], Case(**row["case"])): row["real"] for row in real_rows}
                reals = [known[model, ranks, case] for case in of_ranks]
            for case, real in zip(of_ranks, reals, strict=True):
                plan = estimated(model, ranks, case)
                row = {"model": model, "ranks": ranks, "case": dataclasses.asdict(case)}
                row |= {"plan": plan, "real": real, "off": {n: plan[n] / real[n] - 1 for n in BOUNDS}}
                rows.append(row)
                print(line(row), flush=True)
    return rows


def line(row) -> str:
    case = Case(**row["case"])
    text = f"| {row['model']} | {row['ranks']} | {case.name} | {'yes' if case.recompute else 'no'} |"
    for name, bound in BOUNDS.items():
        off = row["off"][name]
        text += f" {row['real'][name] / 1e6:.1f} | {off:+.1%}{'' if abs(off) <= bound else ' **miss**'} |"
    return text


# ---- a large model


class Llama7B(Task):
    """A causal language model with the sizes of Llama 2 7B, and texts of 2,048 tokens."""

    def model(self) -> nn.Module:
        import transformers as hf

        return hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False))  # its defaults are those of 7B

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randint(0, 32000, (1024, 2048)))

    def loss(self, model, batch):
        logits = model(input_ids=batch[0]).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1).float(), batch[0][:, 1:].flatten(), reduction="sum")


def large() -> None:
    begun = time.time()
    from lockstep_lab.plan import inputs, show
    from lockstep_lab.plan.facts import facts_of
    from lockstep_lab.plan.search import search

    torch.set_num_threads(2)
    config = RunConfig.model_validate({"name": "llama-7b", "batch": {"global": 1024}, "train": {"epochs": 1}})
    facts = facts_of(Llama7B(), config)
    traced = time.time() - begun
    world = inputs.world(512, gpus_per_node=8, gpu_name="H100", network_bandwidth="400Gbit/s")
    print(show.text(search(facts, world)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    spent = f"{time.time() - begun:.1f} s with the imports, {time.process_time():.1f} s of CPU time"
    print(f"facts {traced:.1f} s, in all {spent}, at most {peak:.2f} GB RSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert,resnet,vit,segformer,gpt2")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--real", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    if options.large:
        large()
        return
    torch.set_num_threads(1)
    print("| model | ranks | strategy | recomputed | states, MB | plan | activations, MB | plan | peak, MB | plan |")
    print("|---|---:|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    ranks = [int(count) for count in options.ranks.split(",")]
    chosen = {count: (MORE if options.more else BASIC)[count] for count in ranks}
    rows = compare(options.models.split(","), chosen, json.loads(options.real.read_text()) if options.real else None)
    misses = sum(abs(row["off"][name]) > bound for row in rows for name, bound in BOUNDS.items())
    print(f"{misses} of {len(rows) * len(BOUNDS)} figures outside the bounds")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
