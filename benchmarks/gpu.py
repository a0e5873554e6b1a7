"""Training on GPUs: throughput, fraction of the GPU's peak, overhead over a plain loop, and the cost of saving.

    python benchmarks/gpu.py [--device cuda] [--gpus 1] [--rounds 7] [--channels-last] [--output FILE.md]
    python benchmarks/gpu.py --device cpu --small --output page.md    # tiny sizes, to test the benchmark

ResNet-50, a transformer like GPT-2 with 124 million parameters, and a Llama with 1.1 billion, all with random weights
from a config of transformers. The data are synthetic, and come through worker processes and the ordinary loader: images
of 224 pixels as uint8, and sequences of 1,024 or 2,048 tokens. AdamW, clipping, and a log entry every 10 steps.

Lockstep and a plain loop have one model each in one process. With `--gpus N`, N ranks train with DDP in both; batches
are per rank, and figures are those of rank 0. Rounds of both alternate, and each ends when the GPU is done; the result
is the median over rounds of the ratio of their times. The plain loop uses pinned memory, non-blocking copies, autocast,
a loss scale for fp16, and the same optimizer.

FLOPs are counted by `torch.utils.flop_counter` in a forward and a backward pass. MFU is their fraction of the peak that
the vendor states for dense matrices of this number format. Recomputation is not used.

The page is Markdown, to append to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from harness import made_steps

LOG_EVERY = 10
WARM_UP = 5  # steps before the clock starts
SAVES = 3  # of each kind; one more comes first and does not count: its buffers are cold
POOL = 64  # different samples: more would measure the random generator


@dataclass(frozen=True)
class Sizes:
    """The definition of a model, and its batches."""

    config: dict
    """Arguments of the transformers config that differ from the defaults."""
    batch: int
    side: int
    """Pixels of an image's side, or tokens of a sequence."""
    memory_gb: float = 0.0
    """With less memory than this, batches have a quarter of the samples."""


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
FULL = {
    "resnet50": Sizes({"num_labels": 1000}, batch=128, side=224, memory_gb=30),
    "gpt125m": Sizes(NO_DROPOUT, batch=16, side=1024, memory_gb=60),
    "llama1b": Sizes(
        {
            "hidden_size": 2048,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 5632,
            "vocab_size": 32000,
            "use_cache": False,
        },
        batch=4,
        side=2048,
        memory_gb=70,
    ),
}
SMALL = {
    "llama1b": Sizes(
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 500,
            "use_cache": False,
        },
        batch=4,
        side=32,
    ),
    "resnet50": Sizes(
        {"num_labels": 10, "depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}, batch=8, side=32
    ),
    "gpt125m": Sizes(
        NO_DROPOUT
        | {
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 2,
            "vocab_size": 500,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        batch=4,
        side=32,
    ),
}


def task_of(name, sizes):
    """The task: the model, and a data set of any requested length."""
    import torch
    from torch.nn import functional
    from torch.utils.data import Dataset

    from lockstep import Task

    class Samples(Dataset):
        def __init__(self, pool):
            self.pool = pool

        def __len__(self):
            return 2**20

        def __getitem__(self, index):
            return tuple(tensor[index % POOL] for tensor in self.pool)

    draw = torch.Generator().manual_seed(0)

    class Pictures(Task):
        def model(self):
            from transformers import ResNetConfig, ResNetForImageClassification

            return ResNetForImageClassification(ResNetConfig(**sizes.config))

        def train_data(self):
            pictures = torch.randint(256, (POOL, 3, sizes.side, sizes.side), generator=draw, dtype=torch.uint8)
            return Samples((pictures, torch.randint(sizes.config["num_labels"], (POOL,), generator=draw)))

        def loss(self, model, batch):
            logits = model(batch[0].float() / 127.5 - 1.0).logits
            return functional.cross_entropy(logits.float(), batch[1], reduction="sum")

    class Tokens(Task):
        def model(self):
            from transformers import GPT2Config, GPT2LMHeadModel

            return GPT2LMHeadModel(GPT2Config(**sizes.config))

        def train_data(self):
            most = sizes.config.get("vocab_size", 50257)
            return Samples((torch.randint(most, (POOL, sizes.side), generator=draw),))

        def weight(self, batch):
            return batch[0][:, 1:].numel()

        def loss(self, model, batch):
            logits = model(batch[0]).logits[:, :-1].flatten(0, 1)
            return functional.cross_entropy(logits.float(), batch[0][:, 1:].flatten(), reduction="sum")

    class LlamaTokens(Tokens):
        def model(self):
            from transformers import LlamaConfig, LlamaForCausalLM

            return LlamaForCausalLM(LlamaConfig(**sizes.config))

    return {"resnet50": Pictures, "gpt125m": Tokens, "llama1b": LlamaTokens}[name]()


class Plain:
    """What a careful person writes."""

    def __init__(self, task, world, options):
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        device, data = world.device, task.train_data()

        torch.manual_seed(0)
        self.task, self.device, self.precision = task, device, options["precision"]
        self.model = task.model().to(device).train()
        if options["channels_last"]:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.forward = DistributedDataParallel(self.model) if world.size > 1 else self.model
        self.forward = torch.compile(self.forward, backend=options["backend"]) if options["compile"] else self.forward
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=options["fused"])
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.loader = DataLoader(
            data,
            options["batch"],
            shuffle=world.size == 1,
            sampler=DistributedSampler(data) if world.size > 1 else None,
            num_workers=options["workers"],
            pin_memory=device.type == "cuda",
            persistent_workers=options["workers"] > 0,
            drop_last=True,
        )
        self.batches = iter(self.loader)
        self.log = open(os.devnull, "w")

    def run(self, steps):
        import torch

        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)
        running = torch.zeros((), device=self.device)
        for step in range(1, steps + 1):
            batch = [tensor.to(self.device, non_blocking=True) for tensor in next(self.batches)]
            with torch.autocast(self.device.type, kind, enabled=self.precision != "fp32"):
                units = self.task.weight(batch)
                loss = self.task.loss(self.forward, batch) / (len(batch[0]) if units is None else units)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            running += loss.detach()
            if step % LOG_EVERY == 0:
                self.log.write(f"step {step} loss {float(running) / LOG_EVERY:.4f}\n")
                running.zero_()


class Ours:
    """The same through Lockstep's objects and loop, with a log in two files."""

    def __init__(self, task, world, options, folder):
        from lockstep.configs import config_file
        from lockstep.core import loop
        from lockstep.trainer import assemble, joining

        config = {
            "name": options["model"],
            "device": world.device.type,
            "precision": options["precision"],
            "batch": {"global": options["batch"] * world.size, "micro": options["batch"]},
            "data": {"workers": options["workers"]},
            "train": {"steps": 2**19},
            "optim": {"name": "AdamW", "lr": 1e-4, "clip_norm": 1.0, "fused": options["fused"]},
            "compute": {
                "compile": "auto" if options["compile"] else None,
                "compile_backend": options["backend"],
                "channels_last": options["channels_last"],
            },
            "log": {"every_steps": LOG_EVERY, "writers": ["text_log", "json_lines"], "pictures": 0},
        }
        self.config = config_file.parse(config, needs_task=False)
        self.config = self.config.model_copy(update={"batch": self.config.batch.resolve(world.data_size)})
        self.prepared = assemble.run_at(assemble.Setup(self.config, folder), task, world, None)
        self.prepared.intervals = loop.Intervals(log=LOG_EVERY)
        self.prepared.state.forward.train()
        self.folder = folder
        joining.open_writers(self.prepared, None, quiet=True)

    def run(self, steps):
        batches = itertools.islice(self.prepared.batches, steps)
        made_steps(self.prepared, batches, stop=self.prepared.state.step + steps)

    def save_times(self, device, mode):
        """Seconds that training waits for a checkpoint, seconds until it is written, and its bytes."""
        from lockstep.core.checkpoint.retention import CheckpointConfig
        from lockstep.core.checkpoint.saver import Saver
        from lockstep.core.parallel.signals import StopFlag
        from lockstep.core.parallel.stop_consensus import StopConsensus
        from lockstep.core.resume import RunKeeper
        from lockstep.core.training_run import join_parts

        folder = self.folder / mode
        saver = Saver(
            folder, self.prepared.state.world, CheckpointConfig(keep_last=1), tell=print, in_background=mode == "async"
        )
        parts, consensus = join_parts(self.prepared, ()), StopConsensus(self.prepared.state.world, StopFlag())
        save = RunKeeper(self.prepared, saver, parts, consensus).save
        rows = []
        try:
            for _ in range(SAVES + 1):
                self.run(2)
                device.synchronize()
                begun = time.perf_counter()
                save({})
                blocked = time.perf_counter() - begun
                saver.wait()
                rows.append((blocked, time.perf_counter() - begun))
            saver.finish()
        finally:
            saver.close()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return {
            "blocked": statistics.median(row[0] for row in rows[1:]),
            "written": statistics.median(row[1] for row in rows[1:]),
            "bytes": size,
        }


def flops_of_sample(task, device):
    """Floating-point operations of a forward and a backward pass of one sample."""
    import torch
    from torch.utils.data import default_collate
    from torch.utils.flop_counter import FlopCounterMode

    model, data = task.model().to(device).train(), task.train_data()
    batch = [tensor.to(device) for tensor in default_collate([data[0], data[1]])]
    with FlopCounterMode(display=False) as counter, torch.autocast(device.type, torch.bfloat16):
        task.loss(model, batch).backward()
    return counter.get_total_flops() / 2


def measure(task, options, *, rounds, steps, folder, saves):
    """The figures of one case."""
    import torch

    from lockstep.core import devices
    from lockstep.core.parallel.world import join_world

    with join_world(options["device"]) as world, contextlib.ExitStack() as stack:
        device = devices.of(world.device)

        def timed(way, count):
            world.all_sum([0.0])  # the ranks start together
            device.synchronize()
            begun = time.perf_counter()
            way.run(count)
            device.synchronize()
            return (time.perf_counter() - begun) / count

        warm_up = min(steps, WARM_UP)
        gc.collect()
        device.empty_cache()
        device.reset_peak()
        nothing = device.allocated()
        ours = Ours(task, world, options, folder)
        stack.callback(lambda: [writer.close() for writer in ours.prepared.writers])
        timed(ours, warm_up)
        peaks = {"ours": device.peak() - nothing}
        gc.collect()
        held = device.allocated()
        device.reset_peak()
        plain = Plain(task, world, options)
        timed(plain, warm_up)
        peaks["plain"] = device.peak() - held
        pairs = []
        for number in range(rounds):
            first, second = (plain, ours) if number % 2 else (ours, plain)
            times = {first: timed(first, steps), second: timed(second, steps)}
            pairs.append((times[plain], times[ours]))
        ratios = [mine / theirs for theirs, mine in pairs]
        found = {
            "plain_s": statistics.median(pair[0] for pair in pairs),
            "ours_s": statistics.median(pair[1] for pair in pairs),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
            "peaks": peaks if device.has_own_memory else None,
            "skipped": ours.prepared.state.skipped,
            "tf32": torch.get_float32_matmul_precision() != "highest",
        }
        if saves and world.size == 1:
            found["saves"] = {mode: ours.save_times(device, mode) for mode in ("async", "sync")}
        return found


def run_model(arguments):
    """All cases of one model, in this process. Prints a line of JSON for each."""
    import torch

    device = torch.device(arguments.device)
    sizes = (SMALL if arguments.small else FULL)[arguments.as_model]
    batch = arguments.batch or sizes.batch
    if device.type == "cuda" and torch.cuda.get_device_properties(0).total_memory < sizes.memory_gb * 1e9:
        batch //= 4
    if device.type == "cpu":
        torch.set_num_threads(1)
    task = task_of(arguments.as_model, sizes)
    flops = flops_of_sample(task, device)
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    saves = arguments.saves
    for compiles, precision in itertools.product(arguments.compile, arguments.precisions):
        case = {"model": arguments.as_model, "precision": precision, "compile": compiles == "on"}
        about = case | {"batch": batch, "side": sizes.side, "flops": flops * batch, "parameters": parameters}
        options = case | {
            "device": arguments.device,
            "batch": batch,
            "workers": arguments.workers,
            "fused": device.type == "cuda",
            "channels_last": arguments.channels_last and arguments.as_model == "resnet50",
            "backend": "aot_eager" if arguments.small else "inductor",
        }
        try:
            with tempfile.TemporaryDirectory() as folder:
                about |= measure(
                    task,
                    options,
                    rounds=arguments.rounds,
                    steps=arguments.steps,
                    folder=Path(folder),
                    saves=saves,
                )
            saves = False  # once for each model
        except Exception as error:
            traceback.print_exc()
            about["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        torch._dynamo.reset()
        gc.collect()
        if os.environ.get("RANK", "0") == "0":
            print("CASE " + json.dumps(about), flush=True)


# ---- the page


def peak_flops(name, precision, tf32):
    """The GPU's peak per second. None: unknown."""
    try:
        from lockstep.parts import peaks
    except ImportError:
        return None
    return peaks.flops(name, "tf32" if precision == "fp32" and tf32 else precision)


def hardware(arguments):
    """Names and versions, as pairs."""
    import torch
    import transformers

    import lockstep

    pairs = [
        ("Lockstep", lockstep.__version__),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
    ]
    pairs += [("Python", platform.python_version()), ("cores", str(os.cpu_count()))]
    if arguments.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        driver = "unknown"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.check_output(query, text=True, timeout=20).splitlines()[0]
        pairs = [("GPU", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"), *pairs]
        pairs += [("CUDA", str(torch.version.cuda or torch.version.hip)), ("driver", driver)]
        pairs += [("cuDNN", str(torch.backends.cudnn.version()))]
    else:
        pairs = [("CPU", platform.processor() or platform.machine()), *pairs]
    return pairs


def page(cases, arguments, command):
    """The page, as lines."""
    import torch

    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else f"{arguments.device}"
    lines = [
        f"## Training on {arguments.gpus} x {name}"
        if arguments.device == "cuda"
        else "## Tested on the CPU, not on a GPU"
    ]
    lines += [
        "",
        f"{datetime.date.today()}. " + ", ".join(f"{key} {value}" for key, value in hardware(arguments)) + ".",
    ]
    lines += ["", f"`{command}`: {arguments.rounds} rounds of {arguments.steps} steps, {arguments.workers} workers."]
    if arguments.small:
        lines.append("The models are tiny: the names only state their kind.")
    lines += ["Load of the machine at the end: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()) + ".", ""]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines += [f"torchtitan {importlib.metadata.version('torchtitan')} is installed, but was not run.", ""]
    titles = ["model", "precision", "compile", "batch", "plain", "Lockstep", "ratio", "samples/s", "tokens/s"]
    titles += ["MFU, plain", "Lockstep"]
    titles += ["peak memory, plain", "Lockstep"]
    lines += [_row(titles), _row(["---"] * len(titles))]
    for case in cases:
        lines.append(_row(_cells(case, name)))
    with_saves = [case for case in cases if "saves" in case]
    if with_saves:
        titles = ["model", "checkpoint", "async: training waits", "written after", "sync: training waits"]
        lines += ["", "A checkpoint of the model and of Adam's moments, in float32:", "", _row(titles)]
        lines += [_row(["---"] * len(titles))]
        for case in with_saves:
            background, direct = case["saves"]["async"], case["saves"]["sync"]
            row = [case["model"], f"{background['bytes'] / 1e9:.2f} GB", f"{background['blocked']:.3f} s"]
            lines.append(_row([*row, f"{background['written']:.2f} s", f"{direct['blocked']:.2f} s"]))
    for case in cases:
        if case.get("skipped"):
            lines += ["", f"{case['model']}, {case['precision']}: {case['skipped']} steps overflowed and were skipped."]
    return [*lines, ""]


def _cells(case, name):
    head = [case["model"], case["precision"], "yes" if case["compile"] else "no", str(case["batch"])]
    if "error" in case:
        return [*head, case["error"].replace("|", "/"), *[""] * 8]
    samples = case["batch"] / case["ours_s"]  # of a rank
    tokens = "" if case["model"] == "resnet50" else f"{samples * case['side']:,.0f}"
    most = peak_flops(name, case["precision"], case["tf32"])
    mfu = [f"{case['flops'] / case[way] / most:.1%}" if most else "unknown" for way in ("plain_s", "ours_s")]
    peaks = [f"{case['peaks'][way] / 2**30:.2f} GiB" for way in ("plain", "ours")] if case["peaks"] else ["", ""]
    times = [f"{case['plain_s'] * 1e3:.1f} ms", f"{case['ours_s'] * 1e3:.1f} ms"]
    ratio = f"{case['ratio']:.3f} ({case['least']:.3f} to {case['largest']:.3f})"
    return [*head, *times, ratio, f"{samples:,.0f}", tokens, *mfu, *peaks]


def _row(cells):
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=1, help="number of ranks, one per GPU")
    parser.add_argument("--channels-last", action="store_true", help="for ResNet-50")
    parser.add_argument("--small", action="store_true", help="use tiny models, to test the benchmark")
    parser.add_argument("--models", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16", "fp32"], choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--compile", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps per round")
    parser.add_argument("--batch", type=int, help="samples per batch; default: chosen for model and GPU memory")
    parser.add_argument(
        "--workers", type=int, help="loader processes of each way; default: half of the cores, at most 8"
    )
    parser.add_argument("--no-saves", dest="saves", action="store_false", help="measure no saves: they write gigabytes")
    parser.add_argument("--output", type=Path, help="write the page to this file; default: only print it")
    parser.add_argument("--as-model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.small else 7)
    arguments.steps = arguments.steps or (3 if arguments.small else 20)
    if arguments.workers is None:
        arguments.workers = 0 if arguments.small else max(1, min(8, (os.cpu_count() or 2) // 2))
    if arguments.as_model:
        run_model(arguments)
        return 0
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU with torch's CUDA interface is visible: nothing was measured")
        return 0
    command = " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    cases = []
    for model in arguments.models:
        print(f"{model}: {len(arguments.precisions) * len(arguments.compile)} cases", file=sys.stderr, flush=True)
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.gpus}"]
        child = [sys.executable, *(ranks if arguments.gpus > 1 else []), __file__, *sys.argv[1:], "--as-model", model]
        done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=False)
        found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
        if not found:
            print(f"{model} ended with exit code {done.returncode} and measured nothing", file=sys.stderr)
        cases += found
    lines = page(cases, arguments, command)
    if arguments.output:
        arguments.output.write_text("\n".join(lines))
    print("\n".join(lines))
    wanted = len(arguments.models) * len(arguments.precisions) * len(arguments.compile)
    return int(sum("error" not in case for case in cases) < wanted)


if __name__ == "__main__":
    sys.exit(main())
