"""Text classification: any Hugging Face model, or a new one, on any labelled texts."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lockstep import atomic
from lockstep.errors import DataError, UsageError
from lockstep.sources.labels import count_labels, match_labels, split
from lockstep.sources.table import SUFFIXES, Source, lines_of
from lockstep.tasks import confusion
from lockstep.tasks.task import Task
from lockstep.tasks.text import hugging_face, log_header
from lockstep.tasks.text.data import Given, GivenTexts, TextData, Texts, TextSample, Tokens, given, read_texts, tokenise

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = dict[str, Tensor]

_ROLES = ("text", "pair", "label")
_LINE = 100  # characters of a text in the log
_NO_TOKENS = "the text is empty, or has no letter that the tokenizer knows"


@final
class Text(Task):
    """One label per text, or several; cross-entropy summed over samples; accuracy, macro F1, a table by class.

    Args:
        train, eval: a file, a saved `datasets` folder, or a name on the hub, the latter two with `:SPLIT`. Without `eval`,
            `eval_fraction` of every class is held back, drawn by `split_seed`.
        model: name on the Hugging Face hub, or a local folder; None: a new model as `scratch` says.
        scratch: `architecture` (`embedding_bag`, or a model type of transformers), `sizes` (keys of its config), and
            `vocab_size` and `lowercase` of the tokenizer that is trained on the training texts.
        max_length: tokens; longer texts are cut, counted and reported.
        columns: `text` (several are joined), `pair`, `label`; None: those with a usual name.
        multi_label: labels are lists, or text with `label_separator` between labels.
        class_weights: `balanced`, or a weight by label: the loss is a weighted mean, as torch's cross_entropy has it.
        new_head: replace the last layer of a model that already classifies.
        empty: `raise` or `drop` texts without letters.
        subset: the hub's configuration of a data set. header, delimiter, quoting: of CSV; see `Source`.
    """

    def __init__(
        self,
        train: str,
        eval: str | None = None,
        model: str | None = None,
        scratch: Mapping[str, Any] | None = None,
        max_length: int = 128,
        columns: Mapping[str, Any] | None = None,
        multi_label: bool = False,
        label_separator: str = ",",
        class_weights: str | Mapping[str, float] | None = None,
        new_head: bool = False,
        eval_fraction: float = 0.1,
        split_seed: int = 0,
        empty: str = "raise",
        subset: str | None = None,
        header: bool = True,
        delimiter: str | None = None,
        quoting: str | None = None,
    ) -> None:
        self.reading = (subset, header, delimiter, quoting)
        self.source = Source.parse(train, "train", *self.reading)
        self.eval_source = Source.parse(eval, "test", *self.reading) if eval else None
        self.model_name, self.scratch, self.max_length = model, dict(scratch or {}), max_length
        self.columns, self.empty = dict(columns or {}), empty
        self.multi_label, self.separator, self.class_weights, self.new_head = (
            multi_label,
            label_separator,
            class_weights,
            new_head,
        )
        self.fraction, self.split_seed = eval_fraction, split_seed
        self.kept: Path | None = None
        self.trained = False
        self._tokens: dict[Path, Tokens] = {}
        self._new: list[str] = []
        self._parameters = 0
        self._moved: Tensor | None = None

    def setup(self, folder: Path, trained: bool) -> None:
        """Label names, the tokenizer and the model's config are kept in `folder`, in Hugging Face's own files."""
        self.trained = trained
        if not (folder / "config.json").exists():
            try:
                with atomic.staged_folder(folder, replace=True) as staging:
                    self._write(staging, self.config)
            except OSError as error:
                raise UsageError(
                    f"cannot write: {error.strerror}", where=str(folder), remedy="choose another place with --run-dir"
                ) from error
        self.kept = folder
        for name in ("config", "tokenizer"):  # from here on as they were written: the same on every rank
            self.__dict__.pop(name, None)

    # ---- data

    @cached_property
    def _train_texts(self) -> Texts:
        return self._read(self.source)

    @cached_property
    def _eval_texts(self) -> Texts | None:
        return self._read(self.eval_source) if self.eval_source else None

    def _read(self, source: Source) -> Texts:
        text, pair, label = (self.columns.get(role) for role in _ROLES)
        return read_texts(source, text, pair, label, self.multi_label, self.separator, self.empty)

    @cached_property
    def _rows(self) -> tuple[Any, Any]:
        """Of the training data: those for training, and those held back. None: all, and none."""
        if self.eval_source or not self.fraction:
            return None, None
        return split(self._train_texts.codes, self.fraction, self.split_seed)

    @property
    def labels(self) -> list[str]:
        """Label names, in the order of the logits."""
        return [self.config.id2label[number] for number in range(self.config.num_labels)]

    def train_data(self) -> TextData:
        return self._data(self._train_texts, self._rows[0])

    def eval_data(self) -> TextData | None:
        if self._eval_texts is not None:
            return self._data(self._eval_texts)
        if self._nothing_held_back:
            remedy = "give data.eval, a larger task.eval_fraction or more texts of each label; "
            remedy += "or, to train without evaluation, task.eval_fraction=0 and train.eval_every_epochs=0"
            raise DataError(self._nothing_held_back, where=self._train_texts.source, remedy=remedy)
        return None if self._rows[1] is None else self._data(self._train_texts, self._rows[1])

    @property
    def _nothing_held_back(self) -> str | None:
        """Why no text is left for evaluation, where some should be."""
        if self._rows[1] is None or len(self._rows[1]):
            return None
        sizes = np.unique(self._train_texts.codes, axis=0, return_counts=True)[1]
        once = f", and {int((sizes == 1).sum())} of {len(sizes)} labels occur once" if (sizes == 1).any() else ""
        share = f"task.eval_fraction is {self.fraction} of {len(self._train_texts)} texts"
        return f"no text is held back for evaluation: {share}{once}"

    def _data(self, texts: Texts, rows: Any = None) -> TextData:
        if texts.folder not in self._tokens:
            self._tokens[texts.folder] = self._tokenise(texts)
        return TextData(texts, self._tokens[texts.folder], match_labels(texts, self.labels), rows)

    def _tokenise(self, texts: Texts) -> Tokens:
        limit = hugging_face.longest(self.config, self.tokenizer)
        if limit is not None and self.max_length > limit:
            raise UsageError(
                f"{self.max_length} is more than the {limit} tokens that the model takes",
                where="task.max_length",
                remedy=f"use at most {limit}",
            )
        return tokenise(texts, self.tokenizer, hugging_face.digest_of_tokenizer(self.tokenizer), self.max_length)

    # ---- the model

    @cached_property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        if self.kept or self.model_name:
            return hugging_face.load_tokenizer(self.kept or self.model_name or "")
        texts, rows = self._train_texts, self._rows[0]
        mine = range(len(texts)) if rows is None else rows.tolist()
        words = (texts.text(row, part) for part in range(1 + texts.has_pairs) for row in mine)
        digest = f"{texts.folder.name} {self.fraction, self.split_seed, self.eval_source is None}"
        size, lowercase = self.scratch.get("vocab_size", 20000), self.scratch.get("lowercase", True)
        return hugging_face.train_tokenizer(words, digest, size, lowercase)

    @cached_property
    def config(self) -> Any:
        """The model's config, with the label names."""
        if self.kept:
            return hugging_face.load_config(self.kept)
        labels = self._train_texts.names
        least = 1 if self.multi_label else 2
        if len(labels) < least:
            remedy = "check task.columns.label" if labels else "the labels are empty lists"
            raise DataError(
                f"{len(labels)} labels ({', '.join(labels)})", where=self._train_texts.source, remedy=remedy
            )
        if self.model_name:
            config = hugging_face.load_config(self.model_name)
            labels = hugging_face.check_labels(config, labels, self.model_name, self.new_head)
        else:
            sizes, architecture = (
                self.scratch.get("sizes", {}),
                self.scratch.get("architecture", hugging_face.EMBEDDING_BAG),
            )
            config = hugging_face.new_config(architecture, sizes, self.max_length, self.tokenizer)
        hugging_face.set_labels(config, labels, self.multi_label, self.tokenizer.pad_token_id)
        return config

    def model(self) -> nn.Module:
        model, self._new = hugging_face.make_model(
            self.config, None if self.trained else self.model_name, self.new_head
        )
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    # ---- from texts to a loss

    def prepare(self, sample: TextSample, epoch: int, training: bool) -> tuple[Tensor, Tensor | None, Any]:
        types = None if sample.types is None else torch.from_numpy(np.array(sample.types, dtype=np.int64))
        label = (
            sample.label
            if isinstance(sample.label, int)
            else torch.from_numpy(np.array(sample.label, dtype=np.float32))
        )
        return torch.from_numpy(np.array(sample.ids, dtype=np.int64)), types, label

    def collate(self, samples: list[Any]) -> Batch:
        """Pad to the longest of these samples. `input_ids`, `attention_mask` and, for pairs, `token_type_ids`: (samples, tokens); `labels`."""
        ids, types, labels = map(list, zip(*samples, strict=True))
        masks = [torch.ones_like(one) if len(one) else one.new_zeros(1) for one in ids]
        padding = self.tokenizer.pad_token_id
        ids = [one if len(one) else one.new_full((1,), padding) for one in ids]  # a text without tokens
        pad = {"batch_first": True, "padding_side": self.tokenizer.padding_side}
        batch = {"input_ids": pad_sequence(ids, padding_value=float(padding), **pad)}
        batch["attention_mask"] = pad_sequence(masks, **pad)
        if types[0] is not None:
            types = [one if len(one) else one.new_zeros(1) for one in types]
            batch["token_type_ids"] = pad_sequence(types, padding_value=float(self.tokenizer.pad_token_type_id), **pad)
        batch["labels"] = torch.stack(labels) if isinstance(labels[0], Tensor) else torch.tensor(labels)
        return batch

    @cached_property
    def _weights(self) -> Tensor | None:
        """Of the classes."""
        if self.class_weights is None:
            return None
        labels = self.labels
        if self.class_weights == "balanced":
            data = self.train_data()
            counts = count_labels(labels, data.labels if data.rows is None else data.labels[data.rows])
            total = sum(counts.values())
            return torch.tensor([total / (len(labels) * max(1, counts[label])) for label in labels])
        given = dict(self.class_weights) if isinstance(self.class_weights, Mapping) else {}
        unknown = [name for name in given if name not in labels]
        if unknown or not given:
            remedy = f"use balanced, or weights for: {', '.join(labels)}"
            raise UsageError(
                f"no such label: {', '.join(map(repr, unknown)) or repr(self.class_weights)}",
                where="task.class_weights",
                remedy=remedy,
            )
        return torch.tensor([float(given.get(label, 1.0)) for label in labels])

    def weight(self, batch: Batch) -> Tensor | None:
        if self._weights is None:
            return None
        labels = batch["labels"]
        return (
            (labels * self._weights + (1 - labels)).mean(dim=1).sum()
            if self.multi_label
            else self._weights[labels].sum()
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(self._logits(model, batch), batch)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        return logits

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        labels, weights = batch["labels"], self._weights
        if weights is not None and (weights.device, weights.dtype) != (logits.device, logits.dtype):
            if self._moved is None or (self._moved.device, self._moved.dtype) != (logits.device, logits.dtype):
                self._moved = weights.to(logits)  # once: a copy in every step would wait for the device
            weights = self._moved
        if not self.multi_label:
            return functional.cross_entropy(logits, labels, weight=weights, reduction="sum")
        if weights is not None:
            weights = labels * weights + (1 - labels)
        return (
            functional.binary_cross_entropy_with_logits(logits, labels.to(logits), weight=weights, reduction="none")
            .mean(dim=1)
            .sum()
        )

    # ---- what comes out

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.multi_label else logits.float().softmax(dim=-1)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Probabilities by class: (samples, classes). NaN for a text without tokens: the model knows nothing of it."""
        probabilities = self._probabilities(self._logits(model, batch))
        return probabilities.masked_fill(~batch["attention_mask"].any(dim=1, keepdim=True), math.nan)

    def loss_and_output(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self._logits(model, batch)
        return self._loss(logits, batch), self._probabilities(logits)

    def metrics(self) -> MetricCollection:
        """`accuracy` (with several labels per text: all of them right), `macro_f1`, and the table `confusion`."""
        from torchmetrics import MetricCollection, classification

        count = len(self.labels)
        if self.multi_label:
            return MetricCollection(
                {
                    "accuracy": classification.MultilabelExactMatch(count),
                    "macro_f1": classification.MultilabelF1Score(count),
                    "confusion": classification.MultilabelConfusionMatrix(count),
                }
            )
        return MetricCollection(
            {
                "accuracy": classification.MulticlassAccuracy(count, average="micro"),
                "macro_f1": classification.MulticlassF1Score(count),
                "confusion": classification.MulticlassConfusionMatrix(count),
            }
        )

    def update_metrics(self, metrics: MetricCollection, output: Tensor, batch: Batch) -> None:
        metrics.update(output, batch["labels"].long())

    # ---- for people

    def notes(self) -> list[str]:
        """What was read, by class, and what was cut off; and which weights are new."""
        training = self.train_data()
        found = log_header.of_model(self.model_name, self.config.model_type, self._parameters, self._new, len(training))
        found += log_header.of_data("training", training, self.labels, self.max_length) + log_header.of_reading(
            training
        )
        if self._nothing_held_back:
            return [*found, self._nothing_held_back]
        held = self.eval_data()
        if held is not None:
            found += log_header.of_data("evaluation", held, self.labels, self.max_length)
            found += log_header.of_reading(held) if self.eval_source else []
            found += log_header.of_absent_labels(held, self.labels)
        return found

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """Precision, recall and F1 by class, the confusion matrix (of many classes: what is confused most), some samples."""
        counts = values["confusion"]
        parts = [confusion.by_class(counts, self.labels)]
        if not self.multi_label:
            parts.append(confusion.confusions(counts, self.labels))
        parts.append("\n".join(self._shown(sample, output) for sample, output in samples))
        return "\n".join(parts)

    def _shown(self, sample: TextSample, output: Tensor) -> str:
        found, truth = self.describe(output), self.truth(sample)
        right = "right" if found["prediction"] == truth else "wrong"
        text = sample.text if len(sample.text) <= _LINE else f"{sample.text[:_LINE]}..."
        return f"  {right}: {found['prediction']!r} ({found['probability']:.3f}), truth {truth!r}: {' '.join(text.split())}"

    def describe(self, output: Tensor) -> dict[str, Any]:
        if output.isnan().all():
            nothing = {"prediction": None, "probability": None, "probabilities": dict.fromkeys(self.labels)}
            return nothing | {"reason": _NO_TOKENS}
        probabilities = {label: round(value, 6) for label, value in zip(self.labels, output.tolist(), strict=True)}
        if self.multi_label:
            chosen: Any = [label for label, value in probabilities.items() if value > 0.5]
            return {"prediction": chosen, "probability": max(probabilities.values()), "probabilities": probabilities}
        best = int(output.argmax())
        return {
            "prediction": self.labels[best],
            "probability": round(float(output[best]), 6),
            "probabilities": probabilities,
        }

    def truth(self, sample: TextSample) -> Any:
        if isinstance(sample.label, int):
            return self.labels[sample.label] if sample.label >= 0 else None
        return [label for label, mine in zip(self.labels, sample.label, strict=True) if mine]

    def show(self, sample: TextSample) -> dict[str, Any]:
        return {"text": sample.text} | ({} if sample.pair is None else {"text_pair": sample.pair})

    def input_data(self, inputs: Sequence[str]) -> GivenTexts:
        """Texts to label: the rows of a file, the lines of standard input (`-`), or else the argument itself."""
        rows: list[Given] = []
        for number, one in enumerate(inputs):
            if one == "-":
                rows += [
                    Given(f"standard input:{line}", text, None)
                    for line, text in enumerate(lines_of(sys.stdin.read()), start=1)
                ]
            elif Path(one).is_file() or (one.endswith(SUFFIXES) and " " not in one):
                source = Source.parse(one, "train", *self.reading)
                rows += given(source, self.columns.get("text"), self.columns.get("pair"), self.columns.get("label"))
            else:
                rows.append(Given(f"argument {number + 1}", one, None))
        return GivenTexts(rows, self.tokenizer, self.max_length)

    def export(self, model: nn.Module, folder: Path) -> None:
        """What `transformers.pipeline` needs: the config with the label names, and the tokenizer."""
        config: Any = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        self._write(folder, config)

    def _write(self, folder: Path, config: Any) -> None:
        config.save_pretrained(folder)
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.model_max_length = min(
            tokenizer.model_max_length, hugging_face.longest(config, tokenizer) or self.max_length
        )
        tokenizer.save_pretrained(folder)
