"""Text classification: any Hugging Face model, or a new model, on any labelled texts."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lockstep.core.errors import DataError, UsageError, number_of
from lockstep.core.task import Metrics
from lockstep_recipes.look.finding import Extent
from lockstep_recipes.tasks.class_weights import OnDevice, class_weights
from lockstep_recipes.tasks.metadata import keep
from lockstep_recipes.tasks.readers.labels import check_groups_apart, count_labels, match_labels, split, split_groups
from lockstep_recipes.tasks.readers.table import Source
from lockstep_recipes.tasks.text import hugging_face
from lockstep_recipes.tasks.text.data import (
    TextData,
    Texts,
    TextSample,
    TextTokens,
    check_unknown,
    read_texts,
    tokenise,
)
from lockstep_recipes.tasks.text.faults.of_tasks import OF_LABELLED, view_of_texts
from lockstep_recipes.tasks.text.faults.view import TextView
from lockstep_recipes.tasks.text.options import EMBEDDING_BAG, TextOptions
from lockstep_recipes.tasks.text.presenter import TextPresenter, TextTask

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = dict[str, Any]


@final
class Text(TextTask):
    """Each text has a label, or several labels. The loss is the cross-entropy, summed over samples.

    The metrics are accuracy, macro F1 and the confusion matrix.

    Args:
        train, eval: a file, a folder that `datasets` saved, or a name on the hub. A folder and a name may end with
            `:SPLIT`. Without `eval`, a fraction of the training texts is held back for evaluation.
    """

    presenter = TextPresenter
    finders = OF_LABELLED
    """What `lockstep look` looks for: see `lockstep_recipes.look`."""

    def __init__(self, options: TextOptions, train: str, eval: str | None = None) -> None:
        self.options = options
        self.reading = options.of_csv() | {"subset": options.subset}
        self.source = Source.parse(train, split="train", **self.reading)
        self.eval_source = Source.parse(eval, split="test", **self.reading) if eval else None
        self.folder: Path | None = None
        """The folder with tokenizer and config that is kept with the run. None outside a run."""
        self.new_weights, self.parameters = [], 0
        self._trained = False
        self._tokens: dict[Path, TextTokens] = {}

    def setup(self, folder: Path, trained: bool) -> None:
        """Save the tokenizer and the model's config, which contains the label names, in `folder`, in the format of
        Hugging Face."""
        self._trained = trained
        if not (folder / "config.json").exists():
            config, tokenizer, length = self.config, self.tokenizer, self.options.max_length
            keep(folder, "config.json", lambda staging: hugging_face.save(config, tokenizer, length, staging))
        self.folder = folder
        for name in ("config", "tokenizer"):  # read from the files, so that they are the same on all ranks
            self.__dict__.pop(name, None)

    # ---- data

    @cached_property
    def _train_texts(self) -> Texts:
        return read_texts(self.source, self.options)

    @cached_property
    def _eval_texts(self) -> Texts | None:
        return read_texts(self.eval_source, self.options) if self.eval_source else None

    @cached_property
    def _split(self) -> tuple[Any, Any]:
        """The rows of the training texts to train with, and those held back. (None, None): no split."""
        if self.eval_source or not self.options.eval_fraction:
            return None, None
        texts, fraction, seed = self._train_texts, self.options.eval_fraction, self.options.split_seed
        if texts.groups is not None:
            return split_groups(texts.codes, texts.groups, fraction, seed)
        return split(texts.codes, fraction, seed)

    @property
    def labels(self) -> list[str]:
        """Label names, in the order of the logits."""
        return [self.config.id2label[number] for number in range(self.config.num_labels)]

    def train_data(self) -> TextData:
        return self._data(self._train_texts, self._split[0])

    def eval_data(self) -> TextData | None:
        if self._eval_texts is not None:
            if self.options.columns.group is not None and not self._trained:
                check_groups_apart(self._train_texts.groups, self._eval_texts.groups, where=self._eval_texts.source)
            return self._data(self._eval_texts)
        if self.why_nothing_is_held_back:
            remedy = "give data.eval, a larger task.eval_fraction or more texts of each label; "
            remedy += "or, to train without evaluation, task.eval_fraction=0 and train.eval_every_epochs=0"
            raise DataError(self.why_nothing_is_held_back, where=self._train_texts.source, remedy=remedy)
        return None if self._split[1] is None else self._data(self._train_texts, self._split[1])

    def data_to_look_at(self, extent: Extent) -> TextView:
        """The texts of both splits for the finders. What the task refuses is a finding."""
        return view_of_texts(self.train_data, self.eval_data, lambda: self.labels, extent)

    @property
    def why_nothing_is_held_back(self) -> str | None:
        """The reason why texts should be held back for evaluation but none are. None if all is well."""
        if self._split[1] is None or len(self._split[1]):
            return None
        sizes = np.unique(self._train_texts.codes, axis=0, return_counts=True)[1]
        once = (
            f", and {int((sizes == 1).sum())} of {len(sizes)} labels with a single text" if (sizes == 1).any() else ""
        )
        share = f"task.eval_fraction is {self.options.eval_fraction} of {len(self._train_texts)} texts"
        return f"no texts are held back for evaluation: {share}{once}"

    def _data(self, texts: Texts, rows: Any = None) -> TextData:
        labels = match_labels(texts, self.labels)
        if texts.folder not in self._tokens:
            self._tokens[texts.folder] = self._tokenise(texts)
        return TextData(texts, self._tokens[texts.folder], labels=labels, rows=rows)

    def _tokenise(self, texts: Texts) -> TextTokens:
        max_length = self.options.max_length
        limit = hugging_face.longest(self.config, self.tokenizer)
        if limit is not None and max_length > limit:
            what = f"{max_length} is more than the {limit} tokens that the model takes"
            raise UsageError(what, where="task.max_length", remedy=f"use at most {limit}")
        digest = hugging_face.digest_of_tokenizer(self.tokenizer)
        tokens = tokenise(texts, self.tokenizer, digest=digest, max_length=max_length)
        check_unknown(tokens.unknown, tokens.words, where=texts.source, key="task.model")
        return tokens

    # ---- the model

    @cached_property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        if self.folder or self.options.model:
            return hugging_face.load_tokenizer(self.folder or self.options.model or "")
        texts, rows, options = self._train_texts, self._split[0], self.options
        rows = range(len(texts)) if rows is None else rows.tolist()
        parts = (texts.text(row, part) for part in range(1 + texts.has_pairs) for row in rows)
        digest = f"{texts.folder.name} {options.eval_fraction, options.split_seed, self.eval_source is None}"
        scratch = options.scratch
        return hugging_face.train_tokenizer(
            parts, digest=digest, vocab_size=scratch.vocab_size, lowercase=scratch.lowercase
        )

    @cached_property
    def config(self) -> Any:
        """The Hugging Face config of the model, with the label names."""
        if self.folder:
            return hugging_face.load_config(self.folder)
        options, labels = self.options, self._train_texts.names
        least = 1 if options.multi_label else 2
        if len(labels) < least:
            remedy = "check task.columns.label" if labels else "the labels are empty lists"
            what = f"{number_of(len(labels), 'label')} ({', '.join(labels)})"
            raise DataError(what, where=self._train_texts.source, remedy=remedy)
        if options.model:
            config = hugging_face.load_config(options.model)
            labels = hugging_face.check_labels(config, labels, name=options.model, new_head=options.new_head)
        else:
            config = hugging_face.new_config(options, self.tokenizer, classes=len(labels))
        hugging_face.set_labels(
            config, labels, multi_label=options.multi_label, pad_token_id=self.tokenizer.pad_token_id
        )
        return config

    def model(self) -> nn.Module:
        model, self.new_weights = hugging_face.make_model(self.options, self.config, trained=self._trained)
        if self.options.model is None and self.config.model_type == EMBEDDING_BAG and not self._trained:
            from lockstep_recipes.tasks.text.bag_start import begin_with_counts

            tokenizer = self.tokenizer
            tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
            begin_with_counts(model, self.train_data(), tokens, tokenizer.all_special_ids)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    # ---- from texts to a batch

    def prepare(self, sample: TextSample, epoch: int, training: bool) -> tuple[Tensor, Tensor | None, Any]:
        """Token ids, segments (None without pairs), and the label: a class number, or 0.0 and 1.0 by class."""
        types = None if sample.types is None else torch.from_numpy(np.array(sample.types, dtype=np.int64))
        label: Any = sample.label
        if not isinstance(label, int):
            label = torch.from_numpy(np.array(label, dtype=np.float32))
        return torch.from_numpy(np.array(sample.ids, dtype=np.int64)), types, label

    def collate(self, samples: list[Any]) -> Batch:
        """Pad the samples to the longest of them.

        Returns:
            `input_ids`, `attention_mask` and, for pairs, `token_type_ids`: (samples, tokens). `labels`: (samples,), or
            with several labels per text (samples, classes). `has_padding`: true or false.
        """
        ids, types, labels = map(list, zip(*samples, strict=True))
        masks = [torch.ones_like(tokens) if len(tokens) else tokens.new_zeros(1) for tokens in ids]
        padding = self.tokenizer.pad_token_id
        ids = [
            tokens if len(tokens) else tokens.new_full((1,), padding) for tokens in ids
        ]  # a text may not have any tokens
        pad = {"batch_first": True, "padding_side": self.tokenizer.padding_side}
        batch: Batch = {"input_ids": pad_sequence(ids, padding_value=float(padding), **pad)}
        batch["attention_mask"] = pad_sequence(masks, **pad)
        batch["has_padding"] = not bool(batch["attention_mask"].all())  # known here, without reading from the device
        if types[0] is not None:
            types = [segments if len(segments) else segments.new_zeros(1) for segments in types]
            batch["token_type_ids"] = pad_sequence(types, padding_value=float(self.tokenizer.pad_token_type_id), **pad)
        batch["labels"] = torch.stack(labels) if isinstance(labels[0], Tensor) else torch.tensor(labels)
        return batch

    # ---- from a batch to a loss

    @cached_property
    def _weights(self) -> OnDevice:
        """Weights of the classes."""

        def count() -> dict[str, int]:
            data = self.train_data()
            return count_labels(self.labels, data.labels if data.rows is None else data.labels[data.rows])

        return OnDevice(class_weights(self.options.class_weights, self.labels, count))

    def weight(self, batch: Batch) -> Tensor | None:
        weights, labels = self._weights.tensor, batch["labels"]
        if weights is None:
            return None
        multi = self.options.multi_label
        by_sample: Tensor = (labels * weights + (1 - labels)).mean(dim=1) if multi else weights[labels]
        return by_sample.sum()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self._logits(model, batch)
        loss = self._loss(logits, batch)
        return loss, self._probabilities(logits.detach())

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "has_padding")}
        inputs["attention_mask"] = hugging_face.mask_for(model, batch["attention_mask"], batch.get("has_padding", True))
        logits: Tensor = model(**inputs).logits
        return logits

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        labels, weights = batch["labels"], self._weights.like(logits)
        if not self.options.multi_label:
            return functional.cross_entropy(logits, labels, weight=weights, reduction="sum")
        if weights is not None:
            weights = labels * weights + (1 - labels)
        by_class = functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits), weight=weights, reduction="none"
        )
        return by_class.mean(dim=1).sum()

    # ---- outputs

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.sigmoid() if self.options.multi_label else logits.softmax(dim=-1)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Probabilities by class: (samples, classes).

        NaN for a text without tokens, because the model sees nothing of it.
        """
        probabilities = self._probabilities(self._logits(model, batch))
        return probabilities.masked_fill(~batch["attention_mask"].any(dim=1, keepdim=True), math.nan)

    def metrics(self) -> Metrics:
        """`accuracy` (with several labels per text, all of them must be correct), `macro_f1`, and the matrix
        `confusion`."""
        from torchmetrics import classification

        from lockstep_recipes.tasks.class_metrics import ConfusionByLabel, class_metrics

        count = len(self.labels)
        if not self.options.multi_label:
            return Metrics(class_metrics(count), self._update)
        # The labels were checked when they were read. torchmetrics' checks would wait for the device in every batch.
        quick: dict[str, Any] = {"validate_args": False}
        metrics = {
            "accuracy": classification.MultilabelExactMatch(count, **quick),
            "macro_f1": classification.MultilabelF1Score(count, **quick),
            "confusion": ConfusionByLabel(count),
        }
        return Metrics(metrics, self._update)

    def _update(self, metrics: MetricCollection, output: Tensor, batch: Batch) -> None:
        from lockstep_recipes.tasks.class_metrics import update_class_metrics

        if self.options.multi_label:
            metrics.update(output, batch["labels"].long())
        else:
            update_class_metrics(metrics, output, batch["labels"])
