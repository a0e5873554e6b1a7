"""transformers' example scripts, as they are, beside a plain loop: the losses of each step.

    python benchmarks/adapters_transformers.py transformers/examples/pytorch ag_news/train.csv WORK_FOLDER

Each script runs up to its `Trainer(...)`, whose arguments go to `lockstep.adapters.transformers` and to a plain loop
with the same samples. The package `evaluate` has a stand-in here. Args: the folder of the examples; a CSV file with the
columns text and label; a folder for small models and data. The results are in docs/adapters.md.
"""

import copy
import csv
import inspect
import itertools
import json
import os
import runpy
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from lockstep import Trainer, adapters
from lockstep.core.data.order import derive_seed, permute
from lockstep.core.data.randomness import seed_all

_STEPS, _BATCH, _SEED, _ROWS = 12, 16, 42, 400
_COLLATE = 0x0BA7C4  # the word of the seeds of `collate`, see core.data.loader
_COMMON = (
    f"--do_train --do_eval --output_dir out --max_steps {_STEPS} --per_device_train_batch_size {_BATCH} --use_cpu "
    "--learning_rate 1e-3 --weight_decay 0.01 --warmup_steps 3 --logging_steps 1 --report_to none --save_strategy no "
    f"--eval_strategy steps --eval_steps {_STEPS}"
)
_SCRIPTS = {
    "language-modeling/run_clm.py": ("clm", "txt", "--block_size 48"),
    "language-modeling/run_mlm.py": ("mlm", "txt", "--max_seq_length 48 --line_by_line"),
    "text-classification/run_glue.py": ("classes", "csv", "--max_seq_length 64"),
    "text-classification/run_classification.py": (
        "classes",
        "csv",
        "--max_seq_length 64 --text_column_names sentence1 --label_column_name label --metric_name accuracy",
    ),
    "token-classification/run_ner.py": ("tags", "json", ""),
}


class Captured(Exception):
    """Carries the arguments of a Trainer out of a script."""


class Accuracy:
    """Stands for a metric of `evaluate`."""

    def compute(self, predictions, references, **options):
        if isinstance(predictions[0], list):
            predictions, references = (list(itertools.chain(*of)) for of in (predictions, references))
        right = float(np.mean(np.array(predictions) == np.array(references)))
        return {"accuracy": right} | {f"overall_{name}": right for name in ("precision", "recall", "f1", "accuracy")}


def write(folder, source):
    """Write small models, their tokenizer, and the rows of a CSV file in the forms that the scripts read."""
    with open(source, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:_ROWS]
    labels = sorted({row["label"] for row in rows})
    words = sorted({word for row in rows for word in row["text"].lower().split()})[:3000]
    special = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"]
    vocabulary = {word: place for place, word in enumerate([*special, *words])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.normalizer, tokens.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "mask_token", "cls_token", "sep_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=64, **names)
    bert = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert |= {"vocab_size": len(tokenizer), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 3, "eos_token_id": 4}
    gpt |= {"vocab_size": len(tokenizer), "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    made = {
        "classes": transformers.BertForSequenceClassification(transformers.BertConfig(**bert, num_labels=4)),
        "tags": transformers.BertForTokenClassification(transformers.BertConfig(**bert, num_labels=2)),
        "mlm": transformers.BertForMaskedLM(transformers.BertConfig(**bert)),
        "clm": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for part, own in (("train", rows[:320]), ("valid", rows[320:])):
        with open(folder / f"{part}.csv", "w", newline="", encoding="utf-8") as file:
            pairs = [[row["text"], labels.index(row["label"])] for row in own]
            csv.writer(file).writerows([["sentence1", "label"], *pairs])
        texts = [row["text"].split() for row in own]
        tagged = [{"tokens": text, "ner_tags": ["B" if word.istitle() else "O" for word in text]} for text in texts]
        (folder / f"{part}.json").write_text("\n".join(map(json.dumps, tagged)))
        (folder / f"{part}.txt").write_text("\n".join(row["text"] for row in own))


def captured(script, arguments):
    """The arguments that a script gives to transformers' Trainer."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Captured as caught:
        return {name: value for name, value in caught.args[0].items() if value is not None}
    raise SystemExit(f"{script} made no Trainer")


def plain(model, data, collator):
    """The losses of a plain loop, with the samples of Lockstep's order."""
    kept_out = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decaying = set(get_parameter_names(model, [nn.LayerNorm], kept_out))
    groups = [
        {
            "params": [one for name, one in model.named_parameters() if (name in decaying) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, 0.01), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = transformers.get_scheduler("linear", optimizer, 3, _STEPS)
    takes = {*inspect.signature(type(model).forward).parameters, "label", "label_ids"}
    per_epoch, losses = -(-len(data) // _BATCH), []
    model.train()
    for step in range(_STEPS):
        epoch, within = divmod(step, per_epoch)
        places = np.arange(within * _BATCH, min(len(data), (within + 1) * _BATCH))
        order = permute(places, len(data), _SEED, epoch)
        seed_all(derive_seed(_SEED, epoch, int(order[0]), _COLLATE))
        samples = [data[int(place)] for place in order]
        batch = collator([{key: value for key, value in sample.items() if key in takes} for sample in samples])
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def main(examples, source, work):
    """Compare the five scripts."""
    warnings.simplefilter("ignore")
    sys.modules["evaluate"] = stand_in = types.ModuleType("evaluate")
    stand_in.load = lambda *args, **options: Accuracy()

    def capture(self, **options):
        raise Captured(options)

    transformers.Trainer.__init__ = capture
    folder = Path(work).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, source)
    for script, (model, form, more) in _SCRIPTS.items():
        files = f"--train_file {folder}/train.{form} --validation_file {folder}/valid.{form}"
        arguments = f"--model_name_or_path {folder}/{model} {files} {more} {_COMMON}".split()
        given = captured(f"{examples}/{script}", arguments)
        data = given["train_dataset"]
        collator = given.get("data_collator") or transformers.DataCollatorWithPadding(given["processing_class"])
        one = plain(copy.deepcopy(given["model"]), data, collator)
        task = adapters.transformers(given.pop("model"), given.pop("args"), **given)
        micro = _BATCH if model == "mlm" else 5  # the collator draws the masks of a micro-batch
        config = {"device": "cpu", "batch": {"micro": micro}, "log": {"writers": ["json_lines"], "pictures": 0}}
        with tempfile.TemporaryDirectory() as run:
            trainer = Trainer(config, run_dir=f"{run}/run", quiet=True)
            results = trainer.fit(task)
            other = [entry["train/loss"] for entry in trainer.history if "train/loss" in entry]
        apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
        print(
            f"{script}: {len(one)} steps, loss {one[0]:.6f} to {one[-1]:.6f}, largest relative difference {apart:.1e}"
        )
        print({name: round(value, 4) for name, value in results.items() if name.startswith("eval/")}, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
