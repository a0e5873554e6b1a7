"""Options for language models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lockstep.configs.task_options import TableOptions
from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.lora.options import LoraOptions

TRAINED_TOKENIZERS = ("bpe", "characters")
"""Tokenizers that are trained on the training texts, by the value of `task.tokenizer`."""

Name = str | Annotated[int, Field(ge=0)]


class LmColumnsOptions(Section):
    """Columns of a table, by name or by index from 0. None: the column with a usual name."""

    text: Name | None = None
    """Plain texts."""
    prompt: Name | list[Name] | None = None
    """Prompts. Several columns are joined with a line break."""
    answer: Name | None = None
    """Answers to the prompts."""
    messages: Name | None = None
    """Chats: lists of `{role, content}`, or of `{from, value}`."""


class SmallOptions(Section):
    """Sizes of Lockstep's own small model with new weights. It computes the same as Llama."""

    layers: PositiveInt = 4
    """Number of blocks."""
    width: PositiveInt = 128
    """Width of the hidden state of a token."""
    heads: PositiveInt = 4
    """Attention heads of a block."""
    kv_heads: PositiveInt | None = None
    """Heads of keys and values, shared by groups of query heads. None: half of `heads`, if possible."""
    hidden: PositiveInt | None = None
    """Width inside the feed-forward layers. None: 8/3 of `width`, as a multiple of 32."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of embeddings and of the output of each layer."""
    tie: bool = True
    """Share the token embeddings with the weights of the last layer."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads, but {self.width} is not a multiple of {2 * self.heads}"
            )
        if self.heads % self.shared_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, but {self.heads} is not a multiple of {self.kv_heads}"
            )
        return self

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or (self.heads if self.heads % 2 else self.heads // 2)

    @property
    def inner_width(self) -> int:
        """Width inside the feed-forward layers."""
        return self.hidden or -(-8 * self.width // (3 * 32)) * 32


class LmOptions(TableOptions):
    """A causal language model: a transformers model, pretrained or new, or Lockstep's own small model."""

    task: ClassVar[str] = "lockstep_recipes.tasks.lm.task:LanguageModel"
    preload: ClassVar[tuple[str, ...]] = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")

    model: str | None = None
    """A pretrained model: a name on the Hugging Face hub, or a local folder."""
    config: str | dict[str, Any] | None = None
    """A new transformers model: a name on the hub or a local folder with its config, or the keys of a config with
    `model_type`, such as `{model_type: gpt2, n_layer: 4}`."""
    small: SmallOptions = SmallOptions()
    """Without `model` and `config`: the sizes of Lockstep's own small model."""
    lora: LoraOptions | None = None
    """Low-rank adapters: `task.lora.rank=16` freezes the weights of `model`, and trains adapters. None: all weights
    train."""
    tokenizer: str | None = None
    """`bpe` or `characters`, which are trained on the training texts, or a name on the hub or a local folder. None:
    that of `model` or `config` if it is a name, otherwise `bpe`."""
    vocab_size: Annotated[int, Field(ge=300)] = 4096
    """Maximum vocabulary size of a `bpe` tokenizer that is trained here."""
    length: Annotated[int, Field(ge=8)] = 256
    """Tokens of a row. Longer documents are split over rows."""
    packing: bool = True
    """Pack several documents into a row. Attention and positions do not cross documents. Without packing, a row is a
    document or a piece of one, and rows are padded to the longest of their micro-batch."""
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """How attention is limited to documents in packed rows. `sdpa`: with a mask of tokens by tokens. `flex` (torch's
    flex attention) and `flash` (flash attention, in 16 bits; transformers models need the package `flash-attn`) require
    CUDA and do not need that mask. `auto`: `flash` for Lockstep's own model on CUDA in 16 bits, if it is not compiled
    and a trial in the first step gives what a mask gives; otherwise `sdpa`."""
    columns: LmColumnsOptions = LmColumnsOptions()
    chat: bool = False
    """Format prompts and answers with the tokenizer's chat template."""
    after_prompt: str = "\n"
    """Text between a prompt and its answer, if they are not formatted with a chat template."""
    loss_chunk: PositiveInt | Literal["auto"] | None = "auto"
    """Compute the loss and its gradient for this many tokens at a time, so that the logits of all tokens are never in
    memory. `auto`: a number that suits vocabulary and device, for Lockstep's own model and common transformers models;
    all tokens if `compute.compile=model` compiles the whole model. None: all tokens."""
    cut_tokens: bool = False
    """With `parallel.tensor`: between sharded layers (norms, dropout, sums), each rank of a group processes only its
    share of the tokens of a row, which saves memory (sequence parallelism): lockstep --explain mesh."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of prompts and answers, and of chats, are learned. For plain text, all are learned."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the documents of a text file. None: a file is a document."""
    suffixes: Annotated[list[str], Field(min_length=1)] = Field(default=[".txt", ".md", ".rst"])
    """Suffixes of the text files to read from a folder."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Without `data.eval`: the fraction of documents that is held back for evaluation. With fewer than ten documents of
    plain text, the end of each is held back."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Seed for choosing the documents that are held back."""
    subset: str | None = None
    """Configuration of a data set on the hub."""
    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    """Prompts that every evaluation continues. None: the starts of three evaluation documents. []: none."""
    exact_match: Annotated[int, Field(ge=0)] = 0
    """Number of evaluation questions that the model answers in each evaluation, with the most probable tokens. The
    result `exact_match` is the fraction of answers with the correct number: the one after ####, otherwise the last."""
    new_tokens: PositiveInt = 64
    """Maximum number of tokens that the model writes, in evaluations and for `lockstep predict`."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Sampling temperature. 0: take the most probable token."""
    top_k: PositiveInt | None = 50
    """Sample from this many most probable tokens. None: from all."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.model is not None and self.config is not None:
            raise ValueError("give either model (pretrained weights) or config (new weights), not both")
        if self.model is not None and self.tokenizer in TRAINED_TOKENIZERS:
            raise ValueError(
                f"tokenizer {self.tokenizer} is new, but the weights of model belong to a different vocabulary"
            )
        if self.lora is not None and self.is_small:
            raise ValueError(
                "lora needs a pretrained model: set model; to use a run, export it first: lockstep export RUN FOLDER"
            )
        return self

    @property
    def is_small(self) -> bool:
        """True for Lockstep's own small model."""
        return self.model is None and self.config is None

    @property
    def given_tokenizer(self) -> str | None:
        """The name or folder of a tokenizer. None: it is trained here."""
        if self.tokenizer is not None:
            return None if self.tokenizer in TRAINED_TOKENIZERS else self.tokenizer
        return self.model or (self.config if isinstance(self.config, str) else None)

    def suggestions(self) -> dict[str, dict[str, Any]]:
        """Optimizer, length and schedule: lockstep --explain language_models."""
        optim: dict[str, Any] = {"name": "AdamW", "clip_norm": 1.0, "args": {"betas": [0.9, 0.95]}}
        optim["groups"] = [{"name": "no_decay", "match": ["*"], "ndim": 1, "weight_decay": 0.0}]
        if self.model or self.lora:
            optim |= {"lr": 2e-4 if self.lora else 2e-5, "weight_decay": 0.01}
            train: dict[str, Any] = {"epochs": 3}
        else:
            optim |= {"lr": 2e-3, "weight_decay": 0.1}
            train = {"epochs": 3, "min_steps": 1000}
        return {"train": train, "optim": optim, "schedule": {"name": "cosine", "warmup_share": 0.05, "end_factor": 0.1}}
