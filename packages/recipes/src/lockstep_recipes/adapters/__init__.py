"""Tasks made from existing code: a LightningModule with its DataModule, or a transformers model with its data.

    from lockstep import Trainer
    from lockstep_recipes import adapters

    Trainer({"train": {"epochs": 3}}).fit(adapters.lightning(MyModule(), MyDataModule()), nproc=2)

`lockstep train my_lightning.py:MyModule` makes such a task automatically. See lockstep --explain adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.task import Task

Weight = Callable[[Any], Any] | str | None
"""What a mean loss is averaged over: a function that counts the units of a batch from its labels only; `samples`; or
None: Lockstep finds the unit by experiment, see `adapters.units`."""


def lightning(
    module: Any,
    datamodule: Any = None,
    *,
    trainer: Mapping[str, Any] | None = None,
    weight: Weight = None,
    ignore: Sequence[str] = (),
) -> Task:
    """Make a task from an unchanged LightningModule (PyTorch Lightning 2).

    `training_step` returns a mean loss. The batch, `configure_optimizers` and `self.log` keep their Lightning meaning,
    over the global batch and all ranks. This function does not import Lightning; the module's own code does.

    Args:
        module: the LightningModule. Each training run starts with a copy of it.
        datamodule: a LightningDataModule, or anything with `train_dataloader` and `val_dataloader`. None: the module's.
        trainer: arguments of Lightning's Trainer, which become config keys: `{"max_epochs": 3}`.
        weight: the units of the loss of `training_step`; see `Weight`.
        ignore: names of hooks that the module overrides and Lockstep should not call.

    Raises:
        UsageError: something is not supported: a hook, manual optimization, a sampler or an argument. Names its line.
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
    """Make a task from an unchanged transformers model with a loss, and the arguments of transformers' Trainer.

    Args:
        model: the model. Each training run starts with a copy of it.
        args: TrainingArguments, a mapping of some of them, or the path of a YAML file with them. They become config
            keys. The defaults are those of transformers 5.
        train_dataset, eval_dataset: map-style data sets.
        data_collator: from a list of samples to a dict of tensors. None: as in Trainer.
        processing_class: the tokenizer, for the default collator.
        compute_metrics: gets an EvalPrediction of all evaluation samples, each once.
        preprocess_logits_for_metrics: gets the outputs and labels of a batch, and returns the outputs to keep.
        model_init: makes the model, instead of `model`.
        weight: the units of the model's loss; see `Weight`.
        further: other arguments of transformers' Trainer, such as `callbacks`. An error names those that are set and
            what to use instead.

    Raises:
        UsageError: an argument is not supported, or the unit of the loss cannot be determined.
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
