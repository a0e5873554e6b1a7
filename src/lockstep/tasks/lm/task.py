"""Language models: the next token of texts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lockstep.core.errors import UsageError
from lockstep.core.task import Metrics, Task
from lockstep.tasks.kept import keep
from lockstep.tasks.lm import models, tokens, writing
from lockstep.tasks.lm.data import NOT_LEARNED, PaddedRows, Prompt, Row, Rows
from lockstep.tasks.lm.documents import Corpus
from lockstep.tasks.lm.options import LmOptions
from lockstep.tasks.lm.presenter import LmPresenter
from lockstep.tasks.lm.tokens import Tokens
from lockstep.tasks.readers.cache import digest_of
from lockstep.tasks.text import hugging_face

Batch = dict[str, Any]
_BEGINNINGS = 3  # evaluation documents whose beginnings are continued
_PROMPT = 16  # tokens of such a beginning
_KIND = "kind_of_texts.txt"  # kept with a run


@final
class LanguageModel(Task):
    """The model predicts the next token. The loss is the cross-entropy, summed over the tokens that are learned.

    Args:
        train, eval: text files, folders, patterns, tables, or names on the hub: see `documents.Corpus`. Without
            `eval`, a share of the training texts is held back for evaluation.
    """

    presenter = LmPresenter
    calls_vary = True  # where texts are written, the model is called for each token

    def __init__(self, options: LmOptions, train: str, eval: str | None = None) -> None:
        self.options = options
        self.corpus = Corpus(train, options)
        self.eval_corpus = Corpus(eval, options, split="test") if eval else None
        self.folder: Path | None = None
        """The folder with tokenizer and config that is kept with the run. None without a run."""
        self.new_weights: list[str] = []
        """Names of the weights that the pretrained model lacks. Known after `model`."""
        self.parameters = 0
        """Number of parameters. Known after `model`."""
        self._trained = False

    def setup(self, folder: Path, trained: bool) -> None:
        """Keep the tokenizer and the model's config in `folder`, as Hugging Face writes them."""
        self._trained = trained
        if not (folder / "config.json").exists():
            config, tokenizer, kind = self.config, self.tokenizer, self._train.tokens.kind

            def save(staging: Path) -> None:
                config.save_pretrained(staging)
                tokenizer.save_pretrained(staging)
                (staging / _KIND).write_text(kind)

            keep(folder, "config.json", save)
        self.folder = folder
        for name in ("config", "tokenizer"):  # they come from the files, so that all ranks have the same
            self.__dict__.pop(name, None)

    # ---- data

    @property
    def _holds_back(self) -> bool:
        return self.eval_corpus is None and self.options.eval_fraction > 0

    @cached_property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        models.import_transformers()
        name = self.folder or self.options.given_tokenizer
        if name is not None:
            tokenizer = hugging_face.load_tokenizer(name)
            if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
                remedy = "give it an eos_token and save it"
                raise UsageError(f"{name} has no token for the end of a text", where="task.tokenizer", remedy=remedy)
            return tokenizer
        part = "training" if self._holds_back else "all"
        share = (self.options.eval_fraction, self.options.split_seed, part)
        digest = digest_of(*self.corpus.settings(), share, files=self.corpus.files())
        return tokens.train_tokenizer(
            self.options, lambda: tokens.read_part(self.corpus, None, self.options, part), digest
        )

    @cached_property
    def config(self) -> Any:
        """The config of the model, as transformers has it."""
        options = self.options
        if self.folder:
            return hugging_face.load_config(self.folder)
        if options.is_small:
            return models.small_config(options.small, self.tokenizer, options.length)
        if options.config is not None:
            return models.new_config(options.config, self.tokenizer, options.length)
        return hugging_face.load_config(options.model or "")

    def _tokens(self, corpus: Corpus, part: str) -> Tokens:
        limit = models.most_tokens(self.config)
        if limit is not None and self.options.length > limit:
            what = f"{self.options.length} is more than the {limit} positions that the model has"
            raise UsageError(what, where="task.length", remedy=f"use at most {limit}")
        return tokens.tokenise(corpus, self.tokenizer, self.options, part=part)

    @cached_property
    def _train(self) -> Rows:
        found = self._tokens(self.corpus, "training" if self._holds_back else "all")
        kind = Rows if self.options.packing else PaddedRows
        return kind(found, length=self.options.length, packed=self.options.packing)

    @cached_property
    def _eval(self) -> Rows | None:
        if self.eval_corpus is None and not self._holds_back:
            return None
        corpus, part = (self.corpus, "held") if self.eval_corpus is None else (self.eval_corpus, "all")
        found = self._tokens(corpus, part)
        packed = self.options.packing
        return Rows(found, length=self.options.length, packed=packed, prompts=self._prompts(found))

    def train_data(self) -> Rows:
        return self._train

    def eval_data(self) -> Rows | None:
        return self._eval

    @cached_property
    def kind(self) -> str:
        """The kind of the training texts: `plain`, `answers` or `chats`."""
        return (self.folder / _KIND).read_text() if self.folder else self._train.tokens.kind

    def prompt(self, text: str, where: str = "") -> Prompt:
        """A text as the model sees it before it continues it: in the form of the training texts."""
        render, whole = tokens.renderer(self.tokenizer), text
        start, _ = tokens.start_and_end(self.tokenizer)
        if self.kind == "chats" and render is not None:
            start, whole = [], render([{"role": "user", "content": text}], add_generation_prompt=True)
        elif self.kind == "answers":
            whole = text + self.options.after_prompt
        ids = self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        return Prompt(text, (*start, *ids), where)

    def _prompts(self, found: Tokens) -> list[Prompt]:
        """The prompts of evaluations: those of the options, or what comes before the first answer of some documents, or
        the beginnings of plain texts."""
        if self.options.prompts is not None:
            return [self.prompt(text) for text in self.options.prompts]
        start, _ = tokens.start_and_end(self.tokenizer)
        beginnings = []
        for number, end in enumerate(found.ends[:_BEGINNINGS].tolist()):
            begin = int(found.ends[number - 1]) if number else 0
            learned = found.counts[begin + len(start) : end]
            first = int(learned.argmax()) if not learned[0] else _PROMPT
            ids = found.ids[begin : begin + len(start) + first].tolist()
            beginnings.append(Prompt(self.tokenizer.decode(ids, skip_special_tokens=True), tuple(ids)))
        return beginnings

    # ---- the model

    def model(self) -> nn.Module:
        model, self.new_weights = models.make_model(self.options, self.config, trained=self._trained)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        on_meta = torch.empty(0).device.type == "meta"
        if self.options.packing and not self.options.is_small and not on_meta:
            models.check_no_leak(model, self.config.vocab_size, type(model).__name__)
        return model

    # ---- from rows to a batch

    def prepare(self, sample: Row, epoch: int, training: bool) -> Row:
        return sample._replace(prompts=()) if training else sample

    def collate(self, samples: list[Row]) -> Batch:
        """Pad rows to `task.length`, or without packing to the longest of them.

        Returns:
            `input_ids` and `targets`: (rows, tokens). `bytes`: (rows). Where a row has several documents: `documents`
            and `positions`, (rows, tokens). Where rows have prompts: what `writing.prepare_prompts` makes of them, and
            `prompts`, the number of prompts of each row.
        """
        width = max(len(row.ids) for row in samples)
        if self.options.packing and width:
            width = max(width, self.options.length)

        def padded(name: str, value: int) -> Tensor:
            columns = [torch.from_numpy(getattr(row, name)) for row in samples]
            filled = pad_sequence([*columns, torch.empty(width, dtype=torch.int64)], True, float(value))
            return filled[:-1]

        batch: Batch = {"input_ids": padded("ids", self.tokenizer.pad_token_id)}
        batch["targets"] = padded("targets", NOT_LEARNED)
        batch["bytes"] = torch.tensor([row.bytes for row in samples])
        if any(len(row.documents) and row.documents[-1] for row in samples):
            batch["documents"], batch["positions"] = padded("documents", -1), padded("positions", 0)
        prompts = [prompt.ids for row in samples for prompt in row.prompts]
        if prompts:
            kept, new_tokens = writing.room_for(models.most_tokens(self.config), self.options.new_tokens)
            prompts = [ids if kept is None else ids[-kept:] for ids in prompts]
            batch |= writing.prepare_prompts(prompts, new_tokens=new_tokens, padding=self.tokenizer.pad_token_id)
        batch["prompts"] = [len(row.prompts) for row in samples]
        return batch

    def weight(self, batch: Batch) -> Tensor:
        count: Tensor = (batch["targets"] != NOT_LEARNED).sum()
        return count

    # ---- from a batch to a loss and an output

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        if not model.training:
            output = self.predict(model, batch)
            return output["nats"].sum(), output
        logits, targets = self._logits(model, batch).flatten(0, 1), batch["targets"].flatten()
        return functional.cross_entropy(logits, targets, ignore_index=NOT_LEARNED, reduction="sum")

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits of each token: (rows, tokens, vocabulary), in at least float32."""
        mask = models.document_mask(batch["documents"]) if "documents" in batch else None
        logits, _ = models.logits_of(model, batch["input_ids"], batch.get("positions"), mask)
        wide: Tensor = logits if logits.dtype == torch.float64 else logits.float()
        return wide

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the learned tokens of each row, and the texts that the model writes.

        Returns:
            `nats` (the loss), `tokens`, `right` (the most probable token was right), `bytes`: (rows). `written`: tokens
            for each prompt of a row, (rows, prompts, tokens), below 0 where there are none.
        """
        targets = batch["targets"]
        output = {"tokens": (targets != NOT_LEARNED).sum(dim=1), "bytes": batch["bytes"]}
        if targets.shape[1]:
            logits = self._logits(model, batch)
            losses = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_LEARNED, reduction="none"
            )
            right = (logits.argmax(dim=-1) == targets).sum(dim=1)
            output |= {"nats": losses.view_as(targets).sum(dim=1), "right": right}
        else:  # prompts alone
            output |= {"nats": torch.zeros(len(targets), device=targets.device), "right": output["tokens"]}
        return output | {"written": self._written(model, batch)}

    def _written(self, model: nn.Module, batch: Batch) -> Tensor:
        counts, device = batch["prompts"], batch["targets"].device
        _, new_tokens = writing.room_for(models.most_tokens(self.config), self.options.new_tokens)
        by_row = torch.full((len(counts), max(counts), new_tokens), writing.NO_PROMPT, device=device)
        if not max(counts):
            return by_row
        options = self.options
        texts = writing.write(
            model,
            batch["prompt_ids"],
            batch["prompt_mask"],
            batch["draws"],
            temperature=options.temperature,
            top_k=options.top_k,
            end=self.tokenizer.eos_token_id,
        )
        places = [(row, number) for row, count in enumerate(counts) for number in range(count)]
        for text, (row, number) in zip(texts, places, strict=True):
            by_row[row, number] = text
        return by_row

    def metrics(self) -> Metrics:
        """`perplexity`, `bits_per_byte` and `accuracy` of the next token."""
        from lockstep.tasks.lm.metrics import TokenScores

        return Metrics({"tokens": TokenScores()}, lambda metrics, output, batch: metrics.update(output))
