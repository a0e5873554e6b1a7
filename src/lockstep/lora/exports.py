"""Export a peft model: adapters for `PeftModel.from_pretrained`, or merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep.lora.frozen import BASE

ADAPTER_FILE = "adapter_model.safetensors"


def is_peft(model: nn.Module) -> bool:
    """True if the model is the result of `peft.get_peft_model`. This does not import peft."""
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def adapters(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the adapters, with the names that peft reads.

    Args:
        tensors: the full tensors of the `state_dict`, in host memory.

    Raises:
        UsageError: there are several adapters.
    """
    from peft import get_peft_model_state_dict

    name = _adapter(model)
    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, dict(tensors), adapter_name=name, save_embedding_layers=False
    )
    return found


def write_config(model: Any, folder: Path) -> None:
    """Write `adapter_config.json`. The path of a local base model becomes absolute."""
    config = model.peft_config[_adapter(model)]
    before = config.base_model_name_or_path, config.inference_mode
    base = str(before[0] or "")
    config.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).is_dir() else before[0]
    config.inference_mode = True
    try:
        config.save_pretrained(str(folder))
    finally:
        config.base_model_name_or_path, config.inference_mode = before


def write_config_of_base(model: Any, folder: Path) -> None:
    """Write the config that transformers reads next to full weights, if the base model has one."""
    base = model.get_base_model()
    if hasattr(base, "config"):
        base.config.architectures = [type(base).__name__]  # as transformers writes it: only the body may be pretrained
    for name in ("config", "generation_config"):
        config: Any = getattr(base, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(str(folder))


def merged(model: Any) -> dict[str, Tensor]:
    """All weights with the adapters merged, with the names of the model without peft.

    Args:
        model: the full model with the trained weights. It is changed in place.

    Raises:
        UsageError: there are several adapters.
    """
    _adapter(model)
    if BASE in model._modules:
        delattr(model, BASE)
    whole: nn.Module = model.merge_and_unload()
    return {name: tensor for name, tensor in whole.state_dict().items() if isinstance(tensor, Tensor)}


def _adapter(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) > 1:
        what = f"the model has {len(names)} adapters: {', '.join(names)}"
        remedy = "choose the adapters to write in Presenter.export_weights, or train only one"
        raise UsageError(what, where="lockstep export", remedy=remedy)
    return str(names[0])
