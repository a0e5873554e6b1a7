"""Texts that present data, predictions and results of text classification."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.core.task import Task
from lockstep_recipes.look.presenter import DataPresenter
from lockstep_recipes.tasks import confusion
from lockstep_recipes.tasks.hugging_face import config_for_pipeline
from lockstep_recipes.tasks.readers.table import SUFFIXES, Source, lines_of
from lockstep_recipes.tasks.text import hugging_face, log_header
from lockstep_recipes.tasks.text.data import InputText, InputTexts, TextData, TextSample, read_input_texts
from lockstep_recipes.tasks.text.options import TextOptions

_LINE = 100  # characters of a text in the log
_NO_TOKENS = "the text is empty, or the tokenizer does not know any of its characters"


class TextTask(Task):
    """What the presenter reads of the task."""

    options: TextOptions
    reading: dict[str, Any]
    eval_source: Source | None
    new_weights: list[str]
    """Names of the weights that the pretrained model lacks. Known after `model`."""
    parameters: int
    """Number of parameters. Known after `model`."""

    @property
    def config(self) -> Any:
        """The Hugging Face config of the model, with the label names."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        raise NotImplementedError

    @property
    def labels(self) -> list[str]:
        """Label names, in the order of the logits."""
        raise NotImplementedError

    @property
    def why_nothing_is_held_back(self) -> str | None:
        """The reason why texts should be held back for evaluation but none are. None if all is well."""
        raise NotImplementedError

    def train_data(self) -> TextData:
        raise NotImplementedError

    def eval_data(self) -> TextData | None:
        raise NotImplementedError


class TextPresenter(DataPresenter):
    """Presents label names with probabilities, and results by class. INPUT arguments are texts, or files with texts."""

    task: TextTask

    def inputs(self, arguments: Sequence[str]) -> InputTexts:
        """The texts of each argument: the rows of a file, the lines of standard input (`-`), or the argument itself."""
        texts: list[InputText] = []
        for number, argument in enumerate(arguments, start=1):
            if argument == "-":
                lines = lines_of(sys.stdin.read())
                texts += [InputText(f"standard input:{line}", text) for line, text in enumerate(lines, start=1)]
            elif os.path.isfile(argument) or (argument.endswith(SUFFIXES) and " " not in argument):
                source = Source.parse(argument, **self.task.reading)
                texts += read_input_texts(source, self.task.options.columns)
            else:
                texts.append(InputText(f"argument {number}", argument))
        return InputTexts(texts, self.task.tokenizer, self.task.options.max_length)

    def describe(self, output: Tensor) -> dict[str, Any]:
        """The predicted label (with several labels per text: all above 0.5), its probability, and those of all
        labels."""
        labels = self.task.labels
        if output.isnan().all():
            nothing = {"prediction": None, "probability": None, "probabilities": dict.fromkeys(labels)}
            return nothing | {"reason": _NO_TOKENS}
        probabilities = {label: round(value, 6) for label, value in zip(labels, output.tolist(), strict=True)}
        if self.task.options.multi_label:
            chosen: Any = [label for label, value in probabilities.items() if value > 0.5]
            return {"prediction": chosen, "probability": max(probabilities.values()), "probabilities": probabilities}
        best = int(output.argmax())
        found = {"prediction": labels[best], "probability": round(float(output[best]), 6)}
        return {**found, "probabilities": probabilities}

    def truth(self, sample: TextSample) -> Any:
        labels = self.task.labels
        if isinstance(sample.label, int):
            return labels[sample.label] if sample.label >= 0 else None
        return [label for label, has_label in zip(labels, sample.label, strict=True) if has_label]

    def show(self, sample: TextSample) -> dict[str, Any]:
        return {"text": sample.text} | ({} if sample.pair is None else {"text_pair": sample.pair})

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """Precision, recall and F1 by class, the confusion matrix (with many classes, the most frequent confusions),
        samples."""
        counts, labels = values["confusion"], self.task.labels
        matrix = [] if self.task.options.multi_label else [confusion.confusions(counts, labels)]
        shown = "\n".join(self._line(sample, output) for sample, output in samples)
        return "\n".join([confusion.by_class(counts, labels), *matrix, shown])

    def _line(self, sample: TextSample, output: Tensor) -> str:
        described, truth = self.describe(output), self.truth(sample)
        prediction, probability = described["prediction"], described["probability"]
        verdict = "right" if prediction == truth else "wrong"
        text = sample.text if len(sample.text) <= _LINE else f"{sample.text[:_LINE]}..."
        return f"  {verdict}: {prediction!r} ({probability:.3f}), truth {truth!r}: {' '.join(text.split())}"

    def class_names(self) -> list[str]:
        return list(self.task.labels)

    def of_run(self) -> list[str]:
        """The data that was read, by class, truncated texts, and new weights."""
        task, length = self.task, self.task.options.max_length
        training = task.train_data()
        lines = log_header.of_model(
            task.options.model,
            kind=task.config.model_type,
            parameters=task.parameters,
            new=task.new_weights,
            texts=len(training),
        )
        lines += [] if task.options.lora is None else [str(task.options.lora)]
        known: dict[str, Any] = {"labels": task.labels, "max_length": length}
        lines += log_header.of_data("training", training, notes=training.texts.notes, **known)
        if task.why_nothing_is_held_back:
            return [*lines, task.why_nothing_is_held_back, *log_header.of_doubles(training, None, task.labels)]
        evaluation = task.eval_data()
        if evaluation is not None:
            notes = evaluation.texts.notes if task.eval_source else []
            lines += log_header.of_data("evaluation", evaluation, notes=notes, **known)
            lines += log_header.of_absent_labels(evaluation, task.labels)
        return [*lines, *log_header.of_doubles(training, evaluation, task.labels)]

    has_program = False  # transformers builds the model

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the files that `transformers.pipeline` needs: the config with the label names, and the tokenizer."""
        config = config_for_pipeline(model)
        hugging_face.save(config, self.task.tokenizer, self.task.options.max_length, folder)
