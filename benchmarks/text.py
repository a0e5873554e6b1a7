"""Throughput of fine-tuning on real texts: Lockstep, transformers' Trainer, and a plain DDP loop.

    pip install accelerate psutil          # required by transformers' Trainer
    python benchmarks/text.py [--ranks 2] [--rounds 5] [--steps 8] [--micro 16] [--accumulate 4]
        [--model DIR] [--data FILE.csv] [--window 7]

All train the same BERT (four layers of 256, new, unless --model is given) on the same tokens of the same texts with
AdamW (fused, as is the Trainer's default, except in the plain loop), float32, the gradient clipped to 1, global batch =
ranks x micro x accumulate, one torch thread per rank. Batches are padded to the longest of their texts. Runs of the
systems alternate; each is a process per rank that leaves out its first two steps; the result is the median over rounds
of the ratios.

`lockstep-grouped` has `data.group_by_length` = --window (7 global batches of the default are about as many texts as the
Trainer sorts together of 4,000: a quarter), and `trainer-grouped` the Trainer's sorting by length
(`train_sampling_strategy=group_by_length`). That is why tokens are also counted, without padding: the Trainer starts
each of its windows with the longest texts, so a few steps have different texts than a whole epoch. A ratio of tokens
per second of processor time (of all ranks) depends less on other load than a ratio of wall-clock times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness import ratios, spread, take_turns

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("lockstep", "trainer", "plain", "lockstep-grouped", "trainer-grouped")
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
NAMES = ("ranks", "steps", "micro", "accumulate", "data", "model", "window")
WARM_UP = 2
LR = 1e-4


def make_task(options):
    from lockstep_recipes.tasks.text.options import TextOptions, TextScratchOptions
    from lockstep_recipes.tasks.text.task import Text

    text_options = TextOptions(
        eval_fraction=0.0,
        model=options.model,
        scratch=TextScratchOptions(architecture="bert", sizes=SIZES, vocab_size=8000),
        max_length=128,
    )
    return Text(text_options, options.data)


def counted(collate, counts):
    """`collate`, which also appends its number of tokens and of padding tokens to `counts`."""

    def collate_and_count(samples):
        batch = collate(samples)
        counts.append((batch["attention_mask"].numel(), int((batch["attention_mask"] == 0).sum())))
        return batch

    return collate_and_count


def now():
    """Wall-clock seconds, and processor seconds of this process."""
    return time.perf_counter(), time.process_time()


def lockstep_worker(options, grouped=False):
    from lockstep import Trainer
    from lockstep.trainer.joining import Recorder

    task, counts, times = make_task(options), [], []
    task.collate = counted(task.collate, counts)

    class Clock(Recorder):
        def before_step(self, training):
            times.append(now())

        def close(self):
            times.append(now())

    settings = {
        "batch": {"global": options.micro * options.accumulate * options.ranks, "micro": options.micro},
        "train": {"steps": options.steps + WARM_UP},
        "optim": {"lr": LR, "clip_norm": 1.0, "fused": True},
        "device": "cpu",
        "data": {"group_by_length": options.window if grouped else None},
        "log": {"writers": ["text_log", "json_lines"]},
    }
    with tempfile.TemporaryDirectory() as own:
        Trainer(settings, run_dir=options.folder or own, quiet=True).fit(task, Clock())
    counts = counts[-(options.steps + WARM_UP) * options.accumulate :]  # without those of the checks
    return times[WARM_UP : WARM_UP + options.steps + 1], counts


def prepared(options):
    """The same tokens for the other systems, as lists."""
    task = make_task(options)
    data = task.train_data()
    rows = [
        {"input_ids": sample.ids.tolist(), "attention_mask": [1] * len(sample.ids), "labels": sample.label}
        for sample in map(data.__getitem__, range(len(data)))
    ]
    import torch

    torch.manual_seed(0)
    return task, rows


def plain_worker(options):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    torch.distributed.init_process_group("gloo")
    task, rows = prepared(options)
    counts, times = [], []

    def collate(samples):
        return dict(task.tokenizer.pad(samples, return_tensors="pt"))

    model = DistributedDataParallel(task.model().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    sampler = DistributedSampler(rows, shuffle=True, seed=0)
    loader = DataLoader(
        rows, batch_size=options.micro, sampler=sampler, collate_fn=counted(collate, counts), drop_last=True
    )
    steps = micros = epoch = 0
    while steps < options.steps + WARM_UP:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            last = micros % options.accumulate == options.accumulate - 1
            model.require_backward_grad_sync = last
            loss = model(**batch).loss / options.accumulate
            loss.backward()
            micros += 1
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                times.append(now())
                if steps == options.steps + WARM_UP:
                    break
    torch.distributed.destroy_process_group()
    return times[WARM_UP - 1 :], counts


def trainer_worker(options, grouped=False):
    import datasets
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    task, rows = prepared(options)
    counts, times = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(now())

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps + WARM_UP,
        learning_rate=LR,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=50,
        train_sampling_strategy="group_by_length" if grouped else "random",
    )
    collate = counted(DataCollatorWithPadding(task.tokenizer), counts)
    model = task.model().train()
    Trainer(
        model, arguments, data_collator=collate, train_dataset=datasets.Dataset.from_list(rows), callbacks=[Clock()]
    ).train()
    return times[WARM_UP - 1 :], counts


WORKERS = {
    "lockstep": lockstep_worker,
    "lockstep-grouped": lambda options: lockstep_worker(options, True),
    "plain": plain_worker,
    "trainer": trainer_worker,
    "trainer-grouped": lambda options: trainer_worker(options, True),
}


def work(options):
    import torch

    torch.set_num_threads(1)
    times, counts = WORKERS[options.worker](options)
    counts = counts[WARM_UP * options.accumulate : (WARM_UP + options.steps) * options.accumulate]
    Path(options.result, f"{os.environ['RANK']}.json").write_text(json.dumps({"times": times, "counts": counts}))


class Measured(NamedTuple):
    """A run of a system."""

    samples: float
    """Per wall-clock second, over all ranks."""
    padding: float
    """Fraction of all tokens."""
    tokens: float
    """Without padding, per wall-clock second, over all ranks."""
    tokens_cpu: float
    """Without padding, per second of processor time of all ranks."""


def measure(system, options, program=__file__, names=NAMES):
    """A run of `system`: `program --worker system` on each rank, with the options of these names."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.ranks),
            program,
        ]
        command += ["--worker", system, "--result", folder, "--folder", f"{folder}/run"]
        for name in names:
            if getattr(options, name) is not None:
                command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    spans = [[end - start for start, end in zip(rank["times"][0], rank["times"][-1], strict=True)] for rank in ranks]
    seconds, cpu = max(span[0] for span in spans), sum(span[1] for span in spans)
    steps = len(ranks[0]["times"]) - 1
    tokens, padding = (sum(count[place] for rank in ranks for count in rank["counts"]) for place in (0, 1))
    samples, real = steps * options.ranks * options.micro * options.accumulate, tokens - padding
    return Measured(samples / seconds, padding / tokens, real / seconds, real / cpu)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--window", type=int, default=7, help="number of global batches that are sorted together")
    parser.add_argument("--model", help="use a local Hugging Face model instead of a new one")
    parser.add_argument("--data", default=str(ROOT.parent / "shared" / "data" / "text" / "ag_news" / "train.csv"))
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    for name in ("worker", "result", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    make_task(options).train_data()  # tokenised outside the measured time

    def turn(system):
        run = measure(system, options)
        print(f"{system:<24} {described([run])}", flush=True)
        return run

    found = take_turns({system: partial(turn, system) for system in options.systems}, options.rounds)
    for system in options.systems:
        print(f"{system:<17} median {described(found[system])}")
    for ours in ("lockstep", "lockstep-grouped"):
        for theirs in ("trainer", "plain", "trainer-grouped"):
            if ours in found and theirs in found:
                print(f"{ours} over {theirs}: {compared(found[ours], found[theirs])}")


def described(runs):
    samples, padding, tokens, tokens_cpu = (statistics.median(values) for values in zip(*runs, strict=True))
    by_clock = f"{samples:7.1f} samples/s  padding {padding:5.1%}  {tokens:7.0f} tokens/s"
    return f"{by_clock}  {tokens_cpu:7.0f} tokens per second of processor"


def compared(ours, theirs):
    """Medians over rounds of the ratios, with the minimum and the maximum."""
    texts = []
    for name in ("samples", "tokens", "tokens_cpu"):
        of_rounds = ratios(*([getattr(run, name) for run in runs] for runs in (ours, theirs)))
        texts.append(f"{name} {spread(of_rounds)}")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
