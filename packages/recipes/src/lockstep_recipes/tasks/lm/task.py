"""Language models: the next token of texts."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.core import devices
from lockstep.core.blocks import COMPILED_WITH
from lockstep.core.errors import UsageError
from lockstep.core.task import Metrics
from lockstep_recipes.look.finding import Extent
from lockstep_recipes.tasks.lm import attention, chat_date, losses, models, tokens, writing
from lockstep_recipes.tasks.lm.answers import is_match, number_in
from lockstep_recipes.tasks.lm.data import NOT_LEARNED, PackedRows, PaddedRows, Prompt, Row
from lockstep_recipes.tasks.lm.documents import Corpus, Document
from lockstep_recipes.tasks.lm.faults import view_of_documents
from lockstep_recipes.tasks.lm.interface import LmTask
from lockstep_recipes.tasks.lm.options import LmOptions
from lockstep_recipes.tasks.lm.presenter import LmPresenter
from lockstep_recipes.tasks.lm.tokens import DocumentTokens
from lockstep_recipes.tasks.lora.presenter import LoraPresenter
from lockstep_recipes.tasks.metadata import keep
from lockstep_recipes.tasks.readers.cache import digest_of
from lockstep_recipes.tasks.text import hugging_face
from lockstep_recipes.tasks.text.data import check_unknown
from lockstep_recipes.tasks.text.faults.of_tasks import OF_TEXTS
from lockstep_recipes.tasks.text.faults.view import TextView

Batch = dict[str, Any]
_BEGINNINGS = 3  # evaluation documents whose starts are continued
_PROMPT = 16  # tokens of such a start
_KIND = "kind_of_texts.txt"  # kept with a run
_COMPILES = ("cuda",)  # devices on which the loss is compiled with the blocks; on a CPU, compiled code was slower


@final
class LanguageModel(LmTask):
    """The model predicts the next token. The loss is the cross-entropy, summed over learned tokens.

    Args:
        train, eval: text files, folders, patterns, tables, or names on the hub: see `documents.Corpus`. Without
            `eval`, a fraction of the training texts is held back for evaluation.
    """

    presenter = LmPresenter
    finders = OF_TEXTS
    """What `lockstep look` looks for: see `lockstep_recipes.look`."""
    calls_vary = True  # when it writes texts, the model is called for each token

    def __init__(self, options: LmOptions, train: str, eval: str | None = None) -> None:
        self.options = options
        if options.lora is not None:
            self.presenter = LoraPresenter
        self.corpus = Corpus(train, options)
        self.eval_corpus = Corpus(eval, options, split="test") if eval else None
        self.folder, self.stream = None, None
        self.new_weights, self.parameters = [], 0
        self._trained = False
        is_auto = options.attention == "auto" and options.packing
        self._gives_begins = options.attention == "flash" or (is_auto and devices.gpus() > 0)

    def setup(self, folder: Path, trained: bool) -> None:
        """Save the tokenizer and the model's config in `folder`, in the format of Hugging Face."""
        self._trained = trained
        if not (folder / "config.json").exists():
            config, tokenizer, kind = self.config, self.tokenizer, self._train.tokens.kind

            def save(staging: Path) -> None:
                config.save_pretrained(staging)
                tokenizer.save_pretrained(staging)
                (staging / _KIND).write_text(kind)

            keep(folder, "config.json", save)
        self.folder = folder
        for name in ("config", "tokenizer"):  # read from the files, so that they are the same on all ranks
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
            given = (key for key in ("tokenizer", "model", "config") if getattr(self.options, key) is not None)
            where = f"task.{next(given, 'tokenizer')}"
            tokenizer = hugging_face.load_tokenizer(name, where=where)
            if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
                remedy = "give it an eos_token and save it"
                raise UsageError(f"{name} has no token for the end of a text", where=where, remedy=remedy)
            if getattr(tokenizer, "chat_template", None):
                tokenizer.chat_template = chat_date.frozen(tokenizer.chat_template, datetime.now())
            return tokenizer
        part = "training" if self._holds_back else "all"
        options, corpus = self.options, self.corpus
        share = (options.eval_fraction, options.split_seed, part)
        digest = digest_of(*corpus.settings(), share, files=corpus.files())
        return tokens.train_tokenizer(options, lambda: tokens.read_part(corpus, None, options, part), digest)

    @cached_property
    def config(self) -> Any:
        """The config of the model, as a transformers object."""
        options = self.options
        if self.folder:
            return hugging_face.load_config(self.folder)
        if options.is_small:
            return models.small_config(options.small, self.tokenizer, options.length)
        if options.config is not None:
            return models.new_config(options.config, self.tokenizer, options.length)
        return hugging_face.load_config(options.model or "")

    def _tokens(self, corpus: Corpus, part: str) -> DocumentTokens:
        limit = models.most_tokens(self.config)
        if limit is not None and self.options.length > limit:
            what = f"{self.options.length} is more than the {limit} positions that the model has"
            raise UsageError(what, where="task.length", remedy=f"use at most {limit}")
        found = tokens.tokenise(corpus, self.tokenizer, self.options, part=part)
        check_unknown(found.unknown, found.words, where=found.places[0], key="task.model or task.tokenizer")
        known = models.vocabulary(self.config)
        if found.largest >= known:
            what = f"the model has {known} tokens, but the tokenizer produces token {found.largest}"
            raise UsageError(what, where="task.tokenizer", remedy="use the tokenizer that the model was trained with")
        return found

    @cached_property
    def _train(self) -> PackedRows:
        found = self._tokens(self.corpus, "training" if self._holds_back else "all")
        kind = PackedRows if self.options.packing else PaddedRows
        rows = kind(found, length=self.options.length, packed=self.options.packing)
        rows.content_digests = {"training tokens": f"{len(found.ids):,} (digest {found.digest[:12]})"}
        return rows

    @cached_property
    def _eval(self) -> PackedRows | None:
        if self.eval_corpus is None and not self._holds_back:
            return None
        corpus, part = (self.corpus, "held") if self.eval_corpus is None else (self.eval_corpus, "all")
        found = self._tokens(corpus, part)
        questions = self._questions(found)
        prompts = [prompt._replace(answer=None) for prompt in self._prompts(found) if prompt not in questions]
        texts = {"prompts": prompts, "questions": questions}
        return PackedRows(found, length=self.options.length, packed=self.options.packing, **texts)

    def train_data(self) -> PackedRows:
        return self._train

    def eval_data(self) -> PackedRows | None:
        return self._eval

    def data_to_look_at(self, extent: Extent) -> TextView:
        """The documents of both splits for the finders. What the task refuses is a finding.

        The head of a log leaves out corpora above its limit of bytes: their texts would be read once more.
        """

        def documents(corpus: Corpus, part: str) -> list[Document]:
            found = [self._tokens(corpus, part)]
            if extent.bytes is not None and any(one.bytes > extent.bytes for one in [*found, self._train.tokens]):
                return []
            return tokens.read_part(corpus, self.tokenizer, self.options, part)

        reads = {"training": lambda: documents(self.corpus, "training" if self._holds_back else "all")}
        if (other := self.eval_corpus) is not None:
            reads["evaluation"] = lambda: documents(other, "all")
        elif self._holds_back:
            reads["evaluation"] = lambda: documents(self.corpus, "held")
        return view_of_documents(reads, extent, [self.corpus] if other is None else [self.corpus, other])

    @cached_property
    def kind(self) -> str:
        """The kind of the training texts: `plain`, `answers` or `chats`."""
        return (self.folder / _KIND).read_text() if self.folder else self._train.tokens.kind

    def prompt(self, text: str, where: str = "") -> Prompt:
        """A prompt in the form of the training texts, as the model sees it."""
        render, whole = tokens.renderer(self.tokenizer), text
        start, _ = tokens.start_and_end(self.tokenizer)
        if self.kind == "chats" and render is not None:
            start, whole = [], render([{"role": "user", "content": text}], add_generation_prompt=True)
        elif self.kind == "answers":
            whole = text + self.options.after_prompt
        ids = self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        return Prompt(text, (*start, *ids), where)

    def _prompts(self, found: DocumentTokens) -> list[Prompt]:
        """The prompts of evaluations: those of the options, or the text before the first answer of some documents, or
        the starts of plain texts."""
        if self.options.prompts is not None:
            return [self.prompt(text) for text in self.options.prompts]
        return [self._beginning(found, number) for number in range(min(_BEGINNINGS, len(found.ends)))]

    def _questions(self, found: DocumentTokens) -> list[Prompt]:
        """The questions of the evaluation that are answered, with their answers."""
        count = self.options.exact_match
        if count and (found.kind == "plain" or self.options.loss_on == "all"):
            remedy = "evaluate prompts with answers, with task.loss_on=answers, or set task.exact_match=0"
            raise UsageError("the evaluation has no questions with answers", where="task.exact_match", remedy=remedy)
        asked = [self._beginning(found, number) for number in range(min(count, len(found.ends)))]
        return [prompt for prompt in asked if number_in(prompt.answer or "") is not None]

    def _beginning(self, found: DocumentTokens, number: int) -> Prompt:
        """The text before the first answer of a document, with all learned tokens as the answer. For a plain text, its
        start."""
        start, _ = tokens.start_and_end(self.tokenizer)
        begin, end = (int(found.ends[number - 1]) if number else 0), int(found.ends[number])
        learned = found.counts[begin + len(start) : end]
        first = int(learned.argmax()) if not learned[0] else _PROMPT
        ids, rest = found.ids[begin : begin + len(start) + first].tolist(), found.ids[begin + len(start) : end][learned]
        text, answer = (self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, rest))
        return Prompt(text, tuple(ids), found.places[number], answer if not learned[0] else None)

    # ---- the model

    def model(self) -> nn.Module:
        models.check_lengths(self.config, self.options.length, self.options.packing)
        model, self.new_weights = models.make_model(self.options, self.config, trained=self._trained)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if self.options.cut_tokens:
            models.cut_tokens(model)
        if self.options.is_small:
            return model
        if torch.empty(0).device.type != "meta":
            checked = (model, models.vocabulary(self.config), type(model).__name__)
            models.check_causal(*checked)
            if self.options.packing:
                models.check_no_leak(*checked, masked=self.options.attention in ("auto", "sdpa"))
            if self.loss_chunk(model, torch.device("cpu")) is not None:
                models.check_head(*checked)
        attention.use(model, self.options.attention)
        return model

    def loss_chunk(self, model: Any, device: torch.device) -> int | None:
        """The number of tokens whose loss is computed at a time. None: all. The same on all ranks.

        Raises:
            UsageError: chunks are requested and the whole model is compiled, but chunks call a submodule that is not
                compiled.
        """
        chosen = self.options.loss_chunk
        if getattr(model, "_compiled_call_impl", None) is not None:
            if isinstance(chosen, int):
                what = "compute.compile=model compiles the whole model, but task.loss_chunk needs its submodules"
                remedy = "use compute.compile=blocks, or remove one of the two keys"
                raise UsageError(what, where="task.loss_chunk", remedy=remedy)
            return None
        if chosen != "auto":
            return chosen
        is_usual = self.options.is_small or self.config.model_type in models.PLAIN_HEADS
        is_usual &= hasattr(type(model), "get_output_embeddings")  # a substitute for a model has no last layer
        if not (is_usual and isinstance(model.get_output_embeddings(), nn.Linear)):  # it may have an adapter
            return None
        return losses.chunk_for(models.vocabulary(self.config), device)

    # ---- from rows to a batch

    def prepare(self, sample: Row, epoch: int, training: bool) -> Row:
        return sample._replace(prompts=()) if training else sample

    def collate(self, samples: list[Row]) -> Batch:
        """Pad rows to `task.length`, or without packing to the longest of them.

        Returns:
            `input_ids` and `targets`: (rows, tokens). `bytes`: (rows). If rows contain several documents: `documents`
            and `positions`, (rows, tokens). If rows have prompts: the result of `writing.prepare_prompts`, and
            `prompts`, the number of prompts of each row.
        """
        width = max(len(row.ids) for row in samples)
        if self.options.packing and width:
            width = max(width, self.options.length)

        def padded(name: str, value: int) -> Tensor:
            columns = [torch.from_numpy(getattr(row, name)) for row in samples]
            filled = pad_sequence([*columns, torch.empty(width, dtype=torch.int64)], True, float(value))
            return filled[:-1]

        padding = tokens.start_and_end(self.tokenizer)[0][0]  # a token that the model has an embedding for
        batch: Batch = {"input_ids": padded("ids", padding)}
        batch["targets"] = padded("targets", NOT_LEARNED)
        batch["bytes"] = torch.tensor([row.bytes for row in samples])
        if any(len(row.documents) and row.documents[-1] for row in samples):
            batch["documents"], batch["positions"] = padded("documents", -1), padded("positions", 0)
            if self._gives_begins:
                batch["begins"] = attention.begins_of(batch["positions"])
        prompts = [prompt for row in samples for prompt in row.prompts]
        if prompts:
            kept, new_tokens = writing.room_for(models.most_tokens(self.config), self.options.new_tokens)
            ids = [prompt.ids if kept is None else prompt.ids[-kept:] for prompt in prompts]
            greedy = [prompt.answer is not None for prompt in prompts]
            batch |= writing.prepare_prompts(ids, new_tokens=new_tokens, padding=padding, greedy=greedy)
        batch["prompts"], batch["answers"] = [len(row.prompts) for row in samples], [each.answer for each in prompts]
        return batch

    def weight(self, batch: Batch) -> Tensor:
        return torch.sum(batch["targets"] != NOT_LEARNED)

    # ---- from a batch to a loss and an output

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        if not model.training:
            output = self.predict(model, batch)
            return output["nats"].sum(), output
        targets = batch["targets"].flatten()
        chunk = self.loss_chunk(model, targets.device)
        if chunk is None:
            return losses.total(models.called(model, *self._inputs(model, batch)).logits.flatten(0, 1), targets)
        hidden, head = models.hidden_and_head(model, *self._inputs(model, batch))
        options = getattr(model, COMPILED_WITH, None) if targets.device.type in _COMPILES else None
        of_chunk = None if options is None else losses.compiled(**options)
        return losses.total_in_chunks(head, hidden.flatten(0, 1), targets, chunk, of_chunk)

    def _inputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None, Any]:
        """Tokens, positions and mask."""
        return batch["input_ids"], batch.get("positions"), attention.mask_for(self.options.attention, model, batch)

    def _by_token(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each token, and whether the most probable token was correct: (rows, tokens)."""
        targets = batch["targets"]
        chunk = self.loss_chunk(model, targets.device)
        if chunk is None:
            logits = models.called(model, *self._inputs(model, batch)).logits.flatten(0, 1)
            found = losses.by_token(logits, targets.flatten())
        else:
            hidden, head = models.hidden_and_head(model, *self._inputs(model, batch))
            found = losses.by_token_in_chunks(head, hidden.flatten(0, 1), targets.flatten(), chunk)
        return found[0].view_as(targets), found[1].view_as(targets)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the learned tokens of each row, and the texts that the model writes.

        Returns:
            `nats` (the loss), `tokens`, `right` (the most probable token was correct), `bytes`: (rows). `written`:
            tokens for each prompt of a row, (rows, prompts, tokens), negative for missing tokens.
        """
        targets = batch["targets"]
        output = {"tokens": (targets != NOT_LEARNED).sum(dim=1), "bytes": batch["bytes"]}
        if targets.shape[1]:
            nats, right = self._by_token(model, batch)
            output |= {"nats": nats.sum(dim=1), "right": right.sum(dim=1)}
        else:  # only prompts
            output |= {"nats": torch.zeros(len(targets), device=targets.device), "right": output["tokens"]}
        output["written"] = self._written(model, batch)
        return output | (self._matches(batch, output["written"]) if self.options.exact_match else {})

    def _matches(self, batch: Batch, written: Tensor) -> dict[str, Tensor]:
        """`asked` and `matched`: the number of questions of each row, and how many were answered with the correct
        number."""
        asked, matched = (torch.zeros(len(written), dtype=torch.int64, device=written.device) for _ in range(2))
        answers = iter(batch["answers"])
        for row, count in enumerate(batch["prompts"]):
            for tokens_of in written[row, :count]:
                answer = next(answers)
                if answer is not None:
                    asked[row] += 1
                    matched[row] += is_match(self.decoded(tokens_of), answer)
        return {"asked": asked, "matched": matched}

    def decoded(self, written: Tensor) -> str:
        """The text of tokens, without negative ones."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(written[written >= 0].tolist(), **options))

    def _written(self, model: nn.Module, batch: Batch) -> Tensor:
        counts, device = batch["prompts"], batch["targets"].device
        _, new_tokens = writing.room_for(models.most_tokens(self.config), self.options.new_tokens)
        by_row = torch.full((len(counts), max(counts), new_tokens), writing.NO_PROMPT, device=device)
        if not max(counts):
            return by_row
        options = self.options
        inputs = (batch["prompt_ids"], batch["prompt_mask"], batch["draws"])
        chosen: Any = {"temperature": options.temperature, "top_k": options.top_k, "end": self.tokenizer.eos_token_id}
        texts = (self.stream or writing).write(model, *inputs, **chosen)
        places = [(row, number) for row, count in enumerate(counts) for number in range(count)]
        for text, (row, number) in zip(texts, places, strict=True):
            by_row[row, number] = text
        return by_row

    def metrics(self) -> Metrics:
        """`perplexity`, `bits_per_byte` and `accuracy` of the next token, and with questions `exact_match`."""
        from lockstep_recipes.tasks.lm.metrics import TokenScores

        return Metrics(
            {"tokens": TokenScores(bool(self.options.exact_match))},
            lambda metrics, output, batch: metrics.update(output),
        )
