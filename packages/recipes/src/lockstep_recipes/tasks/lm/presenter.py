"""Texts that present data, results and generated texts of language models."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import UsageError, number_of
from lockstep_recipes.look.presenter import DataPresenter
from lockstep_recipes.tasks.hugging_face import config_for_pipeline
from lockstep_recipes.tasks.lm import card, chat_date, documents, models, writing
from lockstep_recipes.tasks.lm.data import PackedRows, Prompts, Row
from lockstep_recipes.tasks.lm.interface import LmTask
from lockstep_recipes.tasks.lm.stream import TextStream, is_prompt
from lockstep_recipes.tasks.readers.input_files import find_files
from lockstep_recipes.tasks.readers.table import SUFFIXES, Source, lines_of

_SHOWN = 8  # maximum number of continued prompts, and of too long prompts, in the log


class LmPresenter(DataPresenter):
    """Presents rows with their perplexity, and texts that the model writes. INPUT arguments are prompts, or files with
    prompts."""

    task: LmTask

    def inputs(self, arguments: Sequence[str]) -> Prompts:
        """The prompts of each argument: the rows of a table, the lines of a text file or of standard input (`-`), those
        of all files in a folder, or the argument itself. Blank lines and rows are left out."""
        found: list[tuple[str, str]] = []
        blank: list[str] = []
        remedy = "give a text that the model continues"
        for number, argument in enumerate(arguments, start=1):
            if not argument:
                raise UsageError("an empty prompt", where=f"argument {number}", remedy=remedy)
            is_text = is_prompt(argument)
            read = [(argument, f"argument {number}")] if is_text else self._of_source(argument)
            found += [(text, where) for text, where in read if is_text or text.strip()]
            blank += [where for text, where in read if not (is_text or text.strip())]
        if not found:
            raise UsageError("no prompt", where=f"INPUT {' '.join(arguments)}", remedy=remedy)
        prompts = [self.task.prompt(text, where) for text, where in found]
        kept, _ = writing.room_for(models.most_tokens(self.task.config), self.task.options.new_tokens)
        cut = [prompt.where for prompt in prompts if kept is not None and len(prompt.ids) > kept][:_SHOWN]
        notes = [f"{where}: the prompt is too long: the model sees only its last {kept} tokens" for where in cut]
        if blank:
            notes.insert(0, f"{number_of(len(blank), 'blank line')} left out, the first is {blank[0]}")
        return Prompts(prompts, notes)

    def stream(self, arguments: Sequence[str]) -> bool:
        """Print the text of a single prompt while it is written."""
        self.task.stream = TextStream(self.task) if len(arguments) == 1 and is_prompt(arguments[0]) else None
        return self.task.stream is not None

    def _of_source(self, name: str) -> list[tuple[str, str]]:
        """The rows or lines of a file, of a folder or of standard input, each with its place."""
        options = self.task.options
        if name == "-":
            lines = enumerate(lines_of(sys.stdin.read()), start=1)
            return [(text, f"standard input:{line}") for line, text in lines]
        if os.path.isdir(name) and documents.Corpus(name, options).source is None:
            return [found for path in find_files([name], SUFFIXES) for found in self._of_source(str(path))]
        table = Source.parse(name, **options.of_csv()).read()
        roles = documents.choose(table, options.columns, needs_answer=False)
        if "messages" in roles:
            remedy = "give a file with a column of prompts"
            raise UsageError("prompts cannot be read from chats", where=name, remedy=remedy)
        names = roles.get("prompt") or roles["text"]
        rows = range(len(table))
        texts = ["\n".join(str(table.columns[column][row] or "") for column in names) for row in rows]
        return [(text, table.where(row)) for row, text in zip(rows, texts, strict=True)]

    def describe(self, output: dict[str, Tensor]) -> dict[str, Any]:
        """The generated texts. For evaluation rows, the number of tokens, the perplexity and the fraction of correct
        tokens."""
        texts = [self.task.decoded(tokens) for tokens in output["written"] if int(tokens[0]) != writing.NO_PROMPT]
        if not int(output["tokens"]):
            return {"text": texts[0] if texts else ""}
        count = int(output["tokens"])
        perplexity = round(math.exp(min(float(output["nats"]) / count, 700.0)), 6)
        described = {"tokens": count, "perplexity": perplexity, "accuracy": round(int(output["right"]) / count, 6)}
        return described | ({"texts": texts} if texts else {})

    def show(self, sample: Row) -> dict[str, Any]:
        texts = [prompt.text for prompt in sample.prompts]
        return {"prompts": texts} if texts and len(sample.ids) else {"prompt": texts[0]} if texts else {}

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """The results in words, and the continued prompts."""
        lines = []
        if "perplexity" in values:
            lines.append(
                f"perplexity {float(values['perplexity']):.4g}, {float(values['bits_per_byte']):.4f} bits per byte of "
                f"text, next token correct in {float(values['accuracy']):.1%}"
            )
        if "exact_match" in values:
            lines.append(f"questions answered with the correct number: {float(values['exact_match']):.1%}")
        texts = [
            f"  {prompt.text!r} -> {self.task.decoded(tokens)!r}"
            for sample, output in samples
            for prompt, tokens in zip(sample.prompts, output["written"], strict=False)
        ]
        return "\n".join([*lines, *list(dict.fromkeys(texts))[:_SHOWN]])

    def of_run(self) -> list[str]:
        """The model, the documents, the rows that they fill, and the remaining padding."""
        task, options = self.task, self.task.options
        kind = "Lockstep's small model (as Llama)" if options.is_small else task.config.model_type
        size = f" of {task.parameters:,} parameters" if task.parameters else ""
        origin = f"pretrained {options.model}" if options.model else "new weights"
        lines = [f"model: {kind}{size}, {origin}; {len(task.tokenizer):,} tokens in the vocabulary"]
        if task.new_weights:
            lines.append(f"  not in {options.model}, so initialised: {', '.join(task.new_weights)}")
        if date := chat_date.date_of(getattr(task.tokenizer, "chat_template", None)):
            lines.append(f"chat template: it prints the date {date}, which is kept with the run")
        lines += self._of_rows("training", task.train_data())
        evaluation = task.eval_data()
        if evaluation is not None:
            lines += self._of_rows("evaluation", evaluation)
        return lines

    def _of_rows(self, name: str, rows: PackedRows) -> list[str]:
        tokens, plan, length = rows.tokens, rows.plan, rows.length
        lines = [
            f"{name}: {number_of(len(tokens.places), 'document')}, {tokens.bytes:,} bytes, {len(tokens.ids):,} tokens "
            f"({int(tokens.counts.sum()):,} to learn)"
        ]
        padding = 1 - int(plan.sizes.sum()) / (len(rows) * length)
        how = "several documents in a row" if rows.packed else "one document per row, before micro-batches are formed"
        lines.append(
            f"  {number_of(len(rows), 'row')} of {length} tokens, {how}: {padding:.2%} of the tokens are padding"
        )
        if plan.split:
            lines.append(f"  split over rows: {number_of(plan.split, 'document')} longer than task.length")
        if tokens.unknown:
            what = f"{number_of(tokens.unknown, 'letter')} that the tokenizer does not know"
            what += f" ({tokens.unknown / tokens.words:.2%})"
            lines.append(f"  warning: {what}: bits per byte ignore their content")
        return lines

    has_program = False  # transformers builds the model

    def export(self, model: nn.Module, folder: Path) -> list[str]:
        """Write what `AutoModelForCausalLM` and `AutoTokenizer` read, and a model card."""
        task = self.task
        transformers = models.import_transformers()
        config = task.config if task.options.is_small else config_for_pipeline(model)
        config.save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)
        options = task.options
        generation: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": options.temperature > 0}
        if options.temperature:
            generation |= {"temperature": options.temperature, "top_k": options.top_k or 0}
        for role in ("bos", "eos", "pad"):
            generation[f"{role}_token_id"] = getattr(task.tokenizer, f"{role}_token_id")
        transformers.GenerationConfig(**generation).save_pretrained(folder)
        (folder / "README.md").write_text(card.write(task, model, step=self.step))
        return []
