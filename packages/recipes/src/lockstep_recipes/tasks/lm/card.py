"""The model card of an export, written from the run."""

from __future__ import annotations

import contextlib
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from lockstep.core.errors import number_of
from lockstep_recipes.tasks.lm.interface import LmTask

_RESULTS = ("eval/loss", "eval/perplexity", "eval/bits_per_byte", "eval/accuracy", "train/loss")
USE = """```python
from transformers import pipeline

print(pipeline("text-generation", model="FOLDER")({prompt})[0]["generated_text"])
```"""


def write(
    task: LmTask, model: nn.Module, library: str = "transformers", use: str = USE, *, step: int | None = None
) -> str:
    """The text of `README.md`: use, data, training, results and versions, as far as the run's folder has them.

    Args:
        step: the step of the weights: the card contains only the results of this step. None: unknown, and the card has
            no results.
    """
    run_dir = task.folder.parent if task.folder is not None else None
    entries = _entries(run_dir / "metrics.jsonl") if run_dir is not None else []
    entries = [entry for entry in entries if step is not None and entry.get("step", step + 1) <= step]
    has_config = run_dir is not None and (run_dir / "config.yaml").is_file()
    config = yaml.safe_load((run_dir / "config.yaml").read_text()) if run_dir and has_config else {}
    options = task.options
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags: [lockstep]"]
    head += [f"base_model: {options.model}"] if options.model and not Path(options.model).is_dir() else []
    kind = f"A causal language model ({task.config.model_type}) of {parameters:,} parameters"
    base = f", fine-tuned from `{options.model}`" if options.model else ", trained from new weights"
    lines = [*head, "---", "", f"# {config.get('name', 'Language model')}", "", f"{kind}{base} with Lockstep.", ""]
    prompt, inputs = _example(task)
    lines += [use.replace("{prompt}", prompt).replace("{inputs}", inputs), "", "## Training", ""]
    lines += [f"- {line}" for line in _training(task, config, entries, step)]
    results = _results([entry for entry in entries if entry["step"] == step])
    if step is not None and not any(name.startswith("eval/") for name in results):
        lines += ["", "## Results", "", f"These weights (step {step:,}) were not evaluated."]
    elif results:
        lines += ["", f"## Results of step {step:,}", "", "| result | value |", "|---|---|"]
        lines += [f"| `{result}` | {value:.5g} |" for result, value in results.items()]
        lines += ["", "`eval/loss` is in nats per token. `eval/bits_per_byte` is comparable across tokenizers."]
    return "\n".join([*lines, ""])


def _example(task: LmTask) -> tuple[str, str]:
    """A prompt in the form of the training texts, and its tokens, both as Python code."""
    if task.kind == "chats":
        chat = '[{"role": "user", "content": "A question"}]'
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        return chat, f"tokenizer.apply_chat_template({chat}, {options})"
    prompt = json.dumps(f"A question{task.options.after_prompt}" if task.kind == "answers" else "The")
    return prompt, f'tokenizer({prompt}, return_tensors="pt")'


def _training(task: LmTask, config: dict[str, Any], entries: list[dict[str, Any]], step: int | None) -> list[str]:
    data, options = config.get("data", {}), task.options
    lines = [f"data: `{data.get('train', task.corpus.name)}`"]
    if task.eval_corpus is not None:
        lines[0] += f"; evaluated on `{task.eval_corpus.name}`"
    elif options.eval_fraction:
        lines[0] += f"; {options.eval_fraction:.0%} held back for evaluation"
    how = "packed without attention across documents" if options.packing else "one document per row"
    lines.append(f"rows of {options.length} tokens, {how}")
    if step:
        batch = config.get("batch", {}).get("global")
        last: dict[str, Any] = max(entries, key=lambda entry: entry["step"], default={})
        epochs = f", {float(last['epoch']) * step / last['step']:.3g} epochs" if last.get("epoch") else ""
        lines.append(f"{number_of(step, 'step')} of {number_of(batch, 'row')}{epochs}, seed {config.get('seed', 0)}")
    optim, schedule = config.get("optim", {}), config.get("schedule", {})
    if optim:
        rates = f"{optim.get('name')}, learning rate {optim.get('lr')}, weight decay {optim.get('weight_decay')}"
        lines.append(f"{rates}, schedule {schedule.get('name')}, precision {config.get('precision')}")
    versions = (f"{name} {importlib.import_module(name).__version__}" for name in ("lockstep", "torch", "transformers"))
    return [*lines, f"versions: {', '.join(versions)}", f"command: {_command(task)}"]


def _command(task: LmTask) -> str:
    """The command that trains this model, with the options of the task."""
    words = [f"data.train={task.corpus.name}"] + ([f"data.eval={task.eval_corpus.name}"] if task.eval_corpus else [])
    for key, value in task.options.model_dump(exclude_defaults=True).items():
        words.append(f"task.{key}={value if isinstance(value, str) else json.dumps(value)}")
    return f"`{shlex.join(['lockstep', 'train', 'lm', *words])}`"


def _results(entries: list[dict[str, Any]]) -> dict[str, float]:
    """The results for the model card."""
    found = {name: value for entry in entries for name, value in entry.items() if name in _RESULTS}
    return {name: float(found[name]) for name in _RESULTS if isinstance(found.get(name), int | float)}


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # after a kill, the last line may be incomplete
            entries.append(json.loads(line))
    return entries
