"""Tasks made of other people's code: a LightningModule with its DataModule, or a model of transformers with its data.

    from lockstep import Trainer
    from lockstep_recipes import adapters

    Trainer({"train": {"epochs": 3}}).fit(adapters.lightning(MyModule(), MyDataModule()), nproc=2)

`lockstep train my_lightning.py:MyModule` makes such a task by itself. See docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.task import Task

Weight = Callable[[Any], Any] | str | None
"""The units that a mean loss is a mean over: a function from a batch to their number, computed from the labels alone;
`samples`; or None: they are found by trying, see `adapters.units`."""


def lightning(
    module: Any,
    datamodule: Any = None,
    *,
    trainer: Mapping[str, Any] | None = None,
    weight: Weight = None,
    ignore: Sequence[str] = (),
) -> Task:
    """The task of a LightningModule, of PyTorch Lightning 2, unchanged.

    `training_step` returns a mean loss; the batch, `configure_optimizers` and `self.log` mean what they mean there,
    over the global batch and over all ranks. Importing Lightning is left to the code that has the module.

    Args:
        module: the LightningModule. Each training begins with a copy of it.
        datamodule: a LightningDataModule, or anything with `train_dataloader` and `val_dataloader`. None: the module's.
        trainer: arguments of Lightning's Trainer, which become keys of the config: `{"max_epochs": 3}`.
        weight: the units of the loss of `training_step`; see `Weight`.
        ignore: names of hooks that the module overrides, and that are to be left out.

    Raises:
        UsageError: something cannot be kept: a hook, a manual optimization, a sampler, an argument. Names its line.
    """
    from lockstep_recipes.adapters.lightning_task import LightningTask

    return LightningTask(module, datamodule, trainer=trainer, weight=weight, ignore=ignore)


def transformers(
    model: Any = None,
    args: Any = None,
    *,
    train_dataset: Any,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    model_init: Callable[[], Any] | None = None,
    weight: Weight = None,
    **further: Any,
) -> Task:
    """The task of a model of transformers with a loss, with the arguments of transformers' Trainer, unchanged.

    Args:
        model: the model. Each training begins with a copy of it.
        args: TrainingArguments, a mapping of some of them, or the path of a YAML file with them. They become keys of
            the config. The defaults are those of transformers 5.
        train_dataset, eval_dataset: map-style data sets.
        data_collator: from a list of samples to a dict of tensors. None: as in Trainer.
        processing_class: the tokenizer, for the default collator.
        compute_metrics: gets an EvalPrediction of all evaluation samples, each once.
        preprocess_logits_for_metrics: gets the outputs and labels of a batch, and returns what is kept of the outputs.
        model_init: makes the model, instead of `model`.
        weight: the units of the model's loss; see `Weight`.
        further: other arguments of transformers' Trainer, such as `callbacks`. An error names all that are set, and
            what to give instead.

    Raises:
        UsageError: an argument cannot be kept, or the units of the loss are not known.
    """
    from lockstep_recipes.adapters.transformers_task import TransformersTask

    return TransformersTask(
        model,
        args,
        model_init=model_init,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        processing_class=processing_class,
        compute_metrics=compute_metrics,
        preprocess=preprocess_logits_for_metrics,
        weight=weight,
        further=further,
    )
