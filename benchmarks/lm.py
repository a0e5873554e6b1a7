"""Tokens per second on real texts: the recipe `lm`, trl's SFTTrainer, transformers' Trainer, and a plain DDP loop.

    pip install trl==1.16.0 accelerate psutil
    python benchmarks/lm.py [--ranks 2] [--rounds 3] [--steps 6] [--length 256] [--micro 8] [--accumulate 2]
        [--data FOLDER] [--systems lockstep trl-packed ...]

All train the same Llama of transformers (four layers of 128, new) on the same tokens of the same paragraphs with AdamW,
float32, the gradient clipped to 1, one torch thread per rank. A micro-batch is --micro rows of --length tokens:

    lockstep          rows packed with a mask by document
    lockstep-padded   one paragraph per row, micro-batches of similar length
    trl-packed        SFTTrainer(packing=True): its own packing (`bfd`), which it trains without padding
    trainer-padded    transformers' Trainer: one paragraph per row, padded to the longest of its micro-batch
    plain             a loop over the packed rows of `lockstep`, read and collated in advance

It counts learned tokens per second, of all ranks. Runs of the systems alternate; each is a process per rank that leaves
out its first two steps. The result is the median over rounds of the ratios. After its steps, each system computes the
loss on the same held-out paragraphs. The systems draw different paragraphs, and a packed step has more tokens than a
padded step. So these losses only show that each system learns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import take_turns
from text import LR, ROOT, WARM_UP, compared, described, measure, now

SYSTEMS = ("lockstep", "trl-packed", "trainer-padded", "lockstep-padded", "plain")
NAMES = ("ranks", "steps", "length", "micro", "accumulate", "data")
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
HELD = 256  # paragraphs


def make_task(options, packed=True):
    from lockstep_recipes.tasks.lm.options import LmOptions
    from lockstep_recipes.tasks.lm.task import LanguageModel

    lm = LmOptions(
        config={"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True, **SIZES},
        length=options.length,
        packing=packed,
        separator="\n\n",
        prompts=[],
    )
    return LanguageModel(lm, options.data)


def counted(collate, counts, labels="labels"):
    """`collate`, which also appends its number of positions and of unlearned positions to `counts`."""

    def collate_and_count(samples):
        batch = collate(samples)
        found = batch[labels] if labels == "targets" else batch[labels][:, 1:]
        counts.append((found.numel(), int((found == -100).sum())))
        return batch

    return collate_and_count


def lockstep_worker(options, packed=True):
    from lockstep import Trainer
    from lockstep.trainer.joining import Recorder

    task, counts, times = make_task(options, packed), [], []
    task.collate = counted(task.collate, counts, "targets")

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
        "log": {"writers": ["text_log", "json_lines"]},
    }
    with tempfile.TemporaryDirectory() as own:
        trainer = Trainer(settings, run_dir=options.folder or own, quiet=True)
        trainer.fit(task, Clock())
        model = trainer.model
    counts = counts[-(options.steps + WARM_UP) * options.accumulate :]  # without those of the checks
    return times[WARM_UP : WARM_UP + options.steps + 1], counts, model


def rows_of(options):
    """The pieces of the paragraphs in the form of the other systems: a list of tokens each."""
    import torch

    task = make_task(options, packed=False)
    data = task.train_data()
    rows = [data[number] for number in range(len(data))]
    torch.manual_seed(0)
    return task, [{"input_ids": [*row.ids.tolist(), int(row.targets[-1])]} for row in rows]


def clock(times):
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(now())

    return Clock()


def arguments_of(options):
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.micro,
        "gradient_accumulation_steps": options.accumulate,
        "max_steps": options.steps + WARM_UP,
        "learning_rate": LR,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "logging_steps": 50,
    }


def trainer_worker(options):
    import datasets
    from transformers import Trainer, TrainingArguments

    task, rows = rows_of(options)
    counts, times = [], []
    if task.tokenizer.pad_token is None:
        task.tokenizer.pad_token = task.tokenizer.eos_token
    arguments = TrainingArguments(**arguments_of(options))
    collate = counted(padding_collator(task), counts)
    model, data = task.model().train(), datasets.Dataset.from_list(rows)
    Trainer(model, arguments, data_collator=collate, train_dataset=data, callbacks=[clock(times)]).train()
    return times[WARM_UP - 1 :], counts, model


def padding_collator(task):
    """Pads to the longest row of the micro-batch, and labels padding as unlearned; end tokens are learned."""
    from transformers import DataCollatorForSeq2Seq

    pad = DataCollatorForSeq2Seq(task.tokenizer)
    return lambda rows: pad([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows])


def trl_worker(options):
    import datasets
    from trl import SFTConfig, SFTTrainer

    task, rows = rows_of(options)
    counts, times = [], []
    if task.tokenizer.pad_token is None:
        task.tokenizer.pad_token = task.tokenizer.eos_token
    own = {"packing": True, "max_length": options.length + 1, "gradient_checkpointing": False, "bf16": False}
    arguments = SFTConfig(**arguments_of(options) | own)
    trainer = SFTTrainer(
        task.model().train(),
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=task.tokenizer,
        callbacks=[clock(times)],
    )
    trainer.data_collator = counted(trainer.data_collator, counts)
    trainer.train()
    return times[WARM_UP - 1 :], counts, trainer.model


def plain_worker(options):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    task, counts, times = make_task(options), [], []
    data, rank = task.train_data(), torch.distributed.get_rank()
    torch.manual_seed(0)
    order = torch.randperm(len(data)).tolist()[rank :: options.ranks]
    collate = counted(task.collate, counts, "targets")
    micros = (options.steps + WARM_UP) * options.accumulate
    batches = []
    for number in range(micros):
        chosen = [order[(number * options.micro + place) % len(order)] for place in range(options.micro)]
        batches.append(collate([data[index] for index in chosen]))
    model = DistributedDataParallel(task.model().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for number, batch in enumerate(batches, 1):
        last = number % options.accumulate == 0
        model.require_backward_grad_sync = last
        plain_loss(model, batch).div(options.accumulate).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(now())
    torch.distributed.destroy_process_group()
    return times[WARM_UP - 1 :], counts, model.module


def plain_loss(model, batch):
    from torch.nn import functional

    more = {}
    if "documents" in batch:  # a row of this batch has several
        documents = batch["documents"]
        more["attention_mask"] = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        more["position_ids"] = batch["positions"]
    logits = model(input_ids=batch["input_ids"], use_cache=False, **more).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


WORKERS = {
    "lockstep": lockstep_worker,
    "lockstep-padded": lambda options: lockstep_worker(options, False),
    "plain": plain_worker,
    "trainer-padded": trainer_worker,
    "trl-packed": trl_worker,
}


def held_loss(task, model):
    """Nats per learned token of the first held-out paragraphs."""
    import torch

    data, total, count = task.eval_data(), 0.0, 0
    model.eval()
    for first in range(0, min(HELD, len(data)), 32):
        batch = task.collate([data[index] for index in range(first, min(first + 32, len(data), HELD))])
        with torch.no_grad():
            total += float(task.loss(model, batch)[0])
        count += int(task.weight(batch))
    return total / count


def work(options):
    import torch

    torch.set_num_threads(1)
    times, counts, model = WORKERS[options.worker](options)
    counts = counts[WARM_UP * options.accumulate : (WARM_UP + options.steps) * options.accumulate]
    found = {"times": times, "counts": counts}
    Path(options.result, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if os.environ["RANK"] == "0":
        loss = held_loss(make_task(options, packed=False), model)
        print(f"      {options.worker}: {loss:.4f} nats per held-out token", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("rounds", 3), ("steps", 6), ("length", 256), ("micro", 8), ("accumulate", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", default=str(ROOT.parent / "shared" / "data" / "lm" / "rust_book"))
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    for name in ("worker", "result", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    for packed in (True, False):  # tokenised outside the measured time
        task = make_task(options, packed)
        task.train_data(), task.eval_data()

    def turn(system):
        run = measure(system, options, __file__, NAMES)
        print(f"{system:<23} {described([run])}  {milliseconds(run, options):.0f} ms per step", flush=True)
        return run

    found = take_turns({system: partial(turn, system) for system in options.systems}, options.rounds)
    for system in options.systems:
        print(f"{system:<16} median {described(found[system])}")
    for ours in ("lockstep", "lockstep-padded"):
        for theirs in ("trl-packed", "trainer-padded", "lockstep-padded", "plain"):
            if ours in found and theirs in found and ours != theirs:
                print(f"{ours} over {theirs}: {compared(found[ours], found[theirs])}")


def milliseconds(run, options):
    return 1000 * options.micro * options.accumulate * options.ranks / run.samples


if __name__ == "__main__":
    main()
