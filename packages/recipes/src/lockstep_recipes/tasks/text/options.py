"""Options for text classification."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from lockstep.configs.task_options import TableOptions
from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.lora.options import LoraOptions

EMBEDDING_BAG = "embedding_bag"


class TextColumnsOptions(Section):
    """Columns of the data, by name or by index from 0. None: the column with a usual name."""

    text: str | int | list[str | int] | None = None
    """The texts. Several columns are joined with a space."""
    pair: str | int | None = None
    """The second text of each sample, for pairs of texts."""
    label: str | int | None = None
    """The label, or the labels."""
    group: str | int | None = None
    """What samples share if they must be on one side of the split, such as an author or a conversation."""


class TextScratchOptions(Section):
    """A new model, and the tokenizer that is trained for it on the training texts."""

    architecture: str = EMBEDDING_BAG
    """`embedding_bag`, or a model type of transformers, such as `bert`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config, such as `hidden_size`."""
    vocab_size: Annotated[int, Field(ge=100)] = 20000
    """Maximum vocabulary size of the tokenizer."""
    lowercase: bool = True
    """Make the tokenizer convert text to lower case and strip accents."""


class TextOptions(TableOptions):
    """Text classification with a Hugging Face model or a new one."""

    task: ClassVar[str] = "lockstep_recipes.tasks.text.task:Text"
    preload: ClassVar[tuple[str, ...]] = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")

    model: str | None = None
    """Name on the Hugging Face hub, or a local folder. None: a new model, described by `scratch`."""
    lora: LoraOptions | None = None
    """Train low-rank adapters and the head, and freeze the weights of `model`. None: all weights train."""
    scratch: TextScratchOptions = TextScratchOptions()
    max_length: Annotated[int, Field(ge=4)] = 128
    """Maximum length of a text in tokens. Longer texts are truncated, counted and reported."""
    columns: TextColumnsOptions = TextColumnsOptions()
    multi_label: bool = False
    """Allow any number of labels per text: lists, or text with `label_separator` between the labels."""
    label_separator: Annotated[str, Field(min_length=1)] = ","
    """Text between the labels of a sample that has several."""
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    """`balanced`, or a weight by label. The loss is then a weighted mean, as in torch's cross_entropy."""
    new_head: bool = False
    """Replace the last layer of a model that already classifies."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Without `data.eval`: the fraction of every class that is held back for evaluation."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Seed for choosing the texts that are held back."""
    empty: Literal["raise", "drop"] = "raise"
    """What to do with blank texts: `raise` an error, or `drop` them."""
    subset: str | None = None
    """Configuration of a data set on the hub."""

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> Self:
        if self.lora is not None and self.model is None:
            raise ValueError(
                "lora needs a pretrained model: set model; to use a run, export it first: lockstep export RUN FOLDER"
            )
        return self

    def suggestions(self) -> dict[str, dict[str, Any]]:
        """Learning rate, length and schedule.

        They were measured on four data sets of 160 to 4,000 texts: lockstep --explain text.
        """
        optim: dict[str, Any] = {"name": "AdamW", "weight_decay": 0.01, "clip_norm": 1.0}
        if self.lora:
            optim["lr"] = 1e-3
            train: dict[str, Any] = {"epochs": 3, "min_steps": 300}
        elif self.model:
            optim |= {"lr": 2e-4, "layer_decay": 0.9}
            train = {"epochs": 3, "min_steps": 300}
        elif self.scratch.architecture == EMBEDDING_BAG:
            optim["lr"] = 0.01
            train = {"epochs": 3, "min_steps": 400}
        else:
            optim["lr"] = 5e-4
            train = {"epochs": 10, "min_steps": 1000}
        return {"train": train, "optim": optim, "schedule": {"name": "linear", "warmup_share": 0.1}}
