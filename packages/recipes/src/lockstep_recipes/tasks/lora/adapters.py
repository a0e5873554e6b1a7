"""peft adapters in transformers models. The weights of the model are frozen, and are not in checkpoints."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError, listed
from lockstep.core.foreign_errors import first_line, optional
from lockstep.lora.frozen import FrozenBase, digest_of, leave_out, trained_only
from lockstep_recipes.tasks.lora.options import LoraOptions

if TYPE_CHECKING:
    from lockstep_recipes.tasks.lm.options import LmOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAPTER = "default"  # peft's default name of an adapter
_HEADS = ("classifier", "score")  # heads that peft trains by itself
_SHOWN = 8


def import_peft() -> Any:
    """The module `peft`.

    Raises:
        UsageError: it is not installed.
    """
    remedy = "pip install peft"
    return optional("peft", "peft is not installed", where="task.lora", remedy=remedy, kind=UsageError)


def adapt(model: nn.Module, missing: list[str], options: LmOptions, lora: LoraOptions) -> nn.Module:
    """Freeze a model, and insert adapters. Its `state_dict` then contains the trainable weights, and a digest of the
    rest.

    Args:
        model: a transformers model, changed in place. Its tensors may be on the meta device.
        missing: names of weights that the pretrained model lacks.

    Raises:
        UsageError: the model is not pretrained, or has no such layers, or peft refuses the options.
    """
    has_values = not next(model.parameters()).is_meta
    if has_values and options.model is None:
        remedy = (
            "set task.model to a name or a folder; to use a Lockstep run, export it first: lockstep export RUN FOLDER"
        )
        raise UsageError(
            "adapters need a pretrained model, but task.config makes a new one", where="task.lora", remedy=remedy
        )
    _refuse(missing, options.model)
    digest = digest_of(model.state_dict()) if has_values else torch.empty(16, dtype=torch.uint8)
    base = FrozenBase(str(options.model), digest, where="task.model")
    _inject(model, lora)
    kept = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return leave_out(model, kept, base)


def classifier(model: Any, missing: list[str], name: str, lora: LoraOptions) -> nn.Module:
    """peft's model of a classifier. The adapters train, and so does the head: everything after the pretrained body.

    Args:
        model: a transformers model, changed in place. Its tensors may be on the meta device.
        missing: names of weights that the pretrained model lacks.
        name: the name of the pretrained model.

    Raises:
        UsageError: the model lacks weights of its body, or has no such layers, or peft refuses the options.
    """
    parts = {part: module for part, module in model.named_children() if part != model.base_model_prefix}
    head = [part for part, module in parts.items() if any(True for _ in module.parameters())]
    _refuse([weight for weight in missing if weight.partition(".")[0] not in head], name)
    for part in head:  # in float32, after a body in base_dtype
        parts[part].register_forward_pre_hook(_in_format_of_weights)
    made: nn.Module = trained_only(_inject(model, lora, [part for part in head if part not in _HEADS]), name)
    base: Any = made.frozen_base
    base.where = "task.model"
    return made.train()


def _in_format_of_weights(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in inputs)


def _refuse(missing: list[str], name: str | None) -> None:
    if missing:
        what = f"{name} lacks weights, which adapters cannot replace: {listed(missing, _SHOWN)}"
        remedy = "train without task.lora first, export with lockstep export, and use that model"
        raise UsageError(what, where="task.model", remedy=remedy)


def merge(model: nn.Module) -> dict[str, Tensor]:
    """Merge the adapters of a model into its weights, and remove them.

    Returns:
        the weights, with the names that they have without adapters.

    Raises:
        UsageError: an adapter belongs to the last layer, which shares its weights with the embeddings.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in layers.items():
        inner: Any = layer
        if counts[id(inner.get_base_layer().weight)] > 1:
            what = f"{name} shares its weights with a different layer, which would also be changed"
            raise UsageError(what, where="--merge", remedy="remove --merge: peft loads the adapters")
        inner.merge()
        model.set_submodule(name, inner.get_base_layer())
    del model.frozen_base
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _inject(model: nn.Module, lora: LoraOptions, head: list[str] | None = None) -> Any:
    """The model with adapters; for a classifier, peft's own model. Trainable weights are in float32.

    Args:
        head: modules of a classifier's head that peft does not know. None: a language model.
    """
    peft = import_peft()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
        modules_to_save=head,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft then sets what suits the layer
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
            is_lm = head is None
            made = peft.inject_adapter_in_model(config, model, ADAPTER) if is_lm else peft.get_peft_model(model, config)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        layers = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.ndim > 1}
        remedy = f"layers have names such as {listed(sorted(layers), _SHOWN)}; or use all-linear"
        raise UsageError(
            f"peft refuses the model: {first_line(error)}", where="task.lora.targets", remedy=remedy
        ) from error
    for parameter in made.parameters():
        if parameter.requires_grad:  # peft creates it in the number format of its layer
            parameter.data = parameter.data.float()
    return made
