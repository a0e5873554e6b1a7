"""Language models on ranks, and the same trainings document by document in plain torch."""

import json
import random

import torch
from torch.nn import functional

from lockstep.core.data.order import permute
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_recipes.tasks.lm.options import LmOptions
from lockstep_recipes.tasks.lm.task import LanguageModel
from tests import runs

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL = {"small": {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2}}
MODELS = {"small": SMALL, "llama": {"config": LLAMA}, "gpt2": {"config": GPT2}}
WORDS = ["a", "the", "of", "to", "see", "say", "cat", "dog", "tree", "house", "river", "blue", "old", "over", "under"]


def texts(count=60, seed=0, longest=60):
    """Texts of 2 to `longest` words, most of them short."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=2 + int(draw.random() ** 3 * (longest - 2)))) + "." for _ in range(count)]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def corpus(folder, **options):
    """A file of texts, as the options of a task name it."""
    return json_lines(folder / "texts.jsonl", [{"text": text} for text in texts(**options)])


def lm_task(train, eval=None, **options):
    return LanguageModel(LmOptions.model_validate(options), train, eval)


def small_task(train, eval=None, **options):
    """A task of the smallest sizes."""
    return lm_task(train, eval, **{**SMALL, "length": 32, "vocab_size": 300, "eval_fraction": 0.0, **options})


def train(options, settings, run_dir=None):
    """A language model in float64."""
    task = small_task(**options)
    return runs.fit(ComparableTask(task, TaskChanges(float64=True)), settings, run_dir)


def pieces(row):
    """The documents in a row: (ids, targets) of each."""
    ids, targets, documents = (torch.from_numpy(column) for column in row[:3])
    return [(ids[documents == number], targets[documents == number]) for number in documents.unique()]


def loss_of_each(model, row):
    """The loss of a row, whose documents the model sees one by one: the sum over tokens, and their number."""
    losses, tokens = [], 0
    for ids, targets in pieces(row):
        logits = model(input_ids=ids[None]).logits[0]
        losses.append(functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100))
        tokens += int((targets != -100).sum())
    return torch.stack(losses).sum(), tokens


def by_hand(options, steps, global_batch, lr, make=None, clip_norm=None):
    """Train by SGD, document by document, with the mean over all tokens of a step.

    Args:
        make: a function that makes the model. None: the task does.

    Returns:
        weights by name, and the mean loss of each step.
    """
    task = small_task(**options)
    data = task.train_data()
    torch.manual_seed(0)
    model = (make or task.model)().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    per_epoch = -(-len(data) // global_batch)
    losses = []
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        places = range(within * global_batch, min((within + 1) * global_batch, len(data)))
        sums, counts = zip(
            *(loss_of_each(model, data[index]) for index in permute(list(places), len(data), 0, epoch)), strict=True
        )
        loss = torch.stack(sums).sum() / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, losses


def difference(one, other):
    """Largest difference of any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
