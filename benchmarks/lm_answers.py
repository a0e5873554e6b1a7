"""Questions with answers of unequal length: does the result depend on ranks and batches?

    pip install trl==1.16.0 accelerate psutil
    python benchmarks/lm_answers.py [--data ../shared/data/lm/gsm8k/test.jsonl] [--systems NAME ...]

The same small Llama and the same tokens for transformers' Trainer, trl's SFTTrainer and Lockstep. Only answers are
learned. Three numbers are compared with one process that computes with plain torch:

    the loss of an evaluation of 101 questions, with micro-batches of 1 and 8, on one and two ranks;
    the weights after one step of plain SGD on 32 questions (of 1 x 32 | 1 x 4 micro-batches x 8 | 2 ranks x 2
    micro-batches x 8), as the distance from the right update, divided by the size of that update;
    the same of a step behind an evaluation by the same trainer.

Other systems are the same with one change:

    trainer-own, trl-own   average_tokens_across_devices=False: each rank divides by its own tokens
    trainer-means          a model with accepts_loss_kwargs=False, as some of transformers have: it returns means
    trainer-start          eval_on_start=True: the evaluation comes in the training and not before
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = {
    "lockstep": {},
    "trainer": {},
    "trl": {},
    "trainer-own": {"average_tokens_across_devices": False},
    "trl-own": {"average_tokens_across_devices": False},
    "trainer-means": {},
    "trainer-start": {"eval_on_start": True, "eval_strategy": "steps"},
}
SETTINGS = ((1, 1), (1, 8), (2, 8))  # ranks and rows of a micro-batch
EVALUATED, TRAINED, LR = 101, 32, 0.1
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}


def task_of(options):
    from lockstep.tasks.lm.options import LmOptions
    from lockstep.tasks.lm.task import LanguageModel

    task_options = LmOptions(model=f"{options.folder}/model", length=512, packing=False, prompts=[], eval_fraction=0.0)
    return LanguageModel(task_options, f"{options.folder}/train.jsonl", f"{options.folder}/eval.jsonl")


def make_model(options):
    """A new small model with a tokenizer of the texts, as folders of Hugging Face, and the two sets of questions."""
    from transformers import LlamaForCausalLM

    from lockstep.tasks.lm.options import LmOptions
    from lockstep.tasks.lm.task import LanguageModel

    lines = options.data.read_text().splitlines()
    Path(options.folder, "train.jsonl").write_text("\n".join(lines[:TRAINED]) + "\n")
    Path(options.folder, "eval.jsonl").write_text("\n".join(lines[TRAINED : TRAINED + EVALUATED]) + "\n")
    new = LmOptions(config={"model_type": "llama", **SIZES}, length=512, vocab_size=1000, eval_fraction=0.0)
    task = LanguageModel(new, str(options.data))
    torch.manual_seed(0)
    LlamaForCausalLM(task.config).save_pretrained(f"{options.folder}/model")
    task.tokenizer.pad_token = task.tokenizer.eos_token
    task.tokenizer.save_pretrained(f"{options.folder}/model")


def features(data):
    """Rows of Lockstep as Hugging Face wants them: tokens, and labels that are not shifted."""
    found = []
    for row in map(data.__getitem__, range(len(data))):
        last = max(int(row.targets[-1]), 0)
        found.append({"input_ids": [*row.ids.tolist(), last], "labels": [-100, *row.targets.tolist()]})
    return found


def exact(options):
    """With plain torch, a row at a time: the loss by token of the evaluation, and the weights after the step."""
    from transformers import AutoModelForCausalLM

    task = task_of(options)
    model = AutoModelForCausalLM.from_pretrained(f"{options.folder}/model")

    def total(rows):
        for row in rows:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            yield functional.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())

    with torch.no_grad():
        sums = [(float(loss), count) for loss, count in total(features(task.eval_data()))]
    rows = features(task.train_data())
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    for loss, _ in total(rows):
        (loss / count).backward()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return sum(loss for loss, _ in sums) / sum(count for _, count in sums), before, after


def work(options):
    """A system in one setting: writes the loss of an evaluation, if it comes first, and the weights after the step."""
    torch.set_num_threads(1)
    loss, model = (lockstep if options.worker == "lockstep" else hugging_face)(options)
    if os.environ["RANK"] == "0":
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.save({"loss": loss, "weights": weights}, options.result)


def hugging_face(options):
    import datasets
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    task, ranks = task_of(options), int(os.environ["WORLD_SIZE"])
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": min(options.micro, TRAINED // ranks),
        "per_device_eval_batch_size": options.micro,
        "gradient_accumulation_steps": max(TRAINED // ranks // options.micro, 1),
        "max_steps": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        **SYSTEMS[options.worker],
    }
    model = AutoModelForCausalLM.from_pretrained(f"{options.folder}/model")
    if options.worker == "trainer-means":
        model.accepts_loss_kwargs = False
    sets = [datasets.Dataset.from_list(features(data)) for data in (task.train_data(), task.eval_data())]
    if options.worker.startswith("trl"):
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**arguments, bf16=False, gradient_checkpointing=False, max_length=None)
        trainer = SFTTrainer(
            model, config, train_dataset=sets[0], eval_dataset=sets[1], processing_class=task.tokenizer
        )
    else:
        collate = DataCollatorForSeq2Seq(task.tokenizer)
        trainer = Trainer(
            model, TrainingArguments(**arguments), data_collator=collate, train_dataset=sets[0], eval_dataset=sets[1]
        )
    loss = trainer.evaluate()["eval_loss"] if options.evaluate else None
    trainer.train()
    return loss, trainer.accelerator.unwrap_model(trainer.model)


def lockstep(options):
    from lockstep import Trainer

    settings = {
        "batch": {"global": TRAINED, "micro": options.micro},
        "train": {"steps": 1, "eval_every_steps": 1},
        "optim": {"name": "SGD", "lr": LR},
        "schedule": {"name": "constant"},
        "device": "cpu",
    }
    loss, task = None, task_of(options)
    if options.evaluate:  # of the untrained model: an evaluation comes after a step, and so of size 0
        first = {**settings, "optim": {"name": "SGD", "lr": 1e-30}}
        loss = Trainer(first, run_dir=f"{options.result}-evaluated", quiet=True).fit(task)["eval/loss"]
    trainer = Trainer(settings, run_dir=f"{options.result}-trained", quiet=True)
    trainer.fit(task)
    return loss, trainer.model


def run(options, system, ranks, micro, evaluate):
    """What a system finds, in processes of its own."""
    result = f"{options.folder}/{system}-{ranks}-{micro}-{evaluate}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--worker", system, "--micro", str(micro), "--folder", options.folder, "--result", result]
    command += ["--evaluate"] if evaluate else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
    return torch.load(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/lm/gsm8k/test.jsonl")
    parser.add_argument("--micro", type=int)
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS)
    parser.add_argument("--evaluate", action="store_true", help=argparse.SUPPRESS)
    for name in ("worker", "result", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    with tempfile.TemporaryDirectory() as options.folder:
        make_model(options)
        right, before, after = exact(options)
        print(f"one process with plain torch: loss {right:.6f}")
        for system in options.systems:
            for ranks, micro in SETTINGS:
                alone, evaluated = (run(options, system, ranks, micro, evaluate) for evaluate in (False, True))
                off = [
                    float((found["weights"] - after).norm() / (after - before).norm()) for found in (alone, evaluated)
                ]
                setting = f"{ranks} x {micro}"
                loss = f"loss {evaluated['loss']:.6f}, off by {evaluated['loss'] - right:+.6f}"
                updates = f"update off by {off[0]:.1e}, behind an evaluation by {off[1]:.1e}"
                print(f"{system:<14} {setting}: {loss}; {updates}", flush=True)


if __name__ == "__main__":
    main()
