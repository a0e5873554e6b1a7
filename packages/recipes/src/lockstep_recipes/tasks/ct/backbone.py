"""The backbone, which processes single slices: any vision model of transformers, with one feature vector per slice."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks import hugging_face
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.vision.image_models import AutoModels

Pooling = Literal["class_token", "mean"]
_KIND = "volume_risk"
_EXTRA = "images"


class SliceBackbone(nn.Module):
    """A vision model of transformers that returns one feature vector for each image.

    Args:
        network: a base model of transformers (`AutoModel`), such as `Dinov2Model` or `ViTModel`.
        pooling: `class_token`: the first token of the last layer. `mean`: the mean over all patches. None:
            `class_token` if the network has a class token, otherwise `mean`.

    Raises:
        UsageError: `pooling` is `class_token` and the network has no class token.
    """

    def __init__(self, network: nn.Module, pooling: Pooling | None = None) -> None:
        super().__init__()
        has_token = any(name.rpartition(".")[2] == "cls_token" for name, _ in network.named_parameters())
        if pooling == "class_token" and not has_token:
            what = f"{type(network).__name__} has no class token"
            raise UsageError(what, where="task.pooling", remedy="set task.pooling=mean")
        self.network = network
        self.pooling: Pooling = pooling or ("class_token" if has_token else "mean")
        self.special_tokens = _special_tokens(network) if has_token else 0
        self.width = _width(network.config)
        """Length of a feature vector."""
        self._options = (
            {"interpolate_pos_encoding": True}
            if "interpolate_pos_encoding" in inspect.signature(type(network).forward).parameters
            else {}
        )

    def forward(self, slices: Tensor) -> Tensor:
        """Feature vectors (N, width) of normalised slices (N, channels, height, width)."""
        hidden: Tensor = self.network(slices, **self._options).last_hidden_state
        if hidden.ndim == 4:  # a convolutional network: (N, width, h, w)
            return hidden.mean(dim=(2, 3))
        if self.pooling == "class_token":
            return hidden[:, 0]
        return hidden[:, self.special_tokens :].mean(dim=1)


def make_backbone(
    options: VolumeRiskOptions, folder: Path | None = None, *, trained: bool = False
) -> tuple[SliceBackbone, list[str]]:
    """A backbone with pretrained weights, or a new backbone.

    Args:
        folder: the folder in which an earlier start of the run saved the config, as `config.json`. None: there is none.
        trained: a checkpoint provides the weights, so pretrained weights are not read.

    Returns:
        the backbone, and the names of weights that the pretrained model lacks.

    Raises:
        UsageError: transformers is not installed, the model cannot be loaded, or it does not take slices like these.
    """
    transformers, channels = hugging_face.import_transformers(_KIND, _EXTRA), options.channels
    config = backbone_config(options, folder)
    known = getattr(config, "num_channels", channels)
    if known != channels:
        what = f"the model takes images with {known} channels, but slices have {channels}"
        raise UsageError(what, where="task.windows", remedy=f"give {known} windows")
    name = None if trained else options.model
    network, missing = hugging_face.make_model(transformers.AutoModel, config, name, what="model", new_head=False)
    network.train()  # pretrained models are in evaluation mode
    if _has_parameters(getattr(network, "pooler", None)):
        network.pooler = None  # type: ignore[assignment]  # features do not use it, so it would not get a gradient
    for module in network.modules():
        token = module._parameters.pop("mask_token", None)
        if token is not None:  # only pretraining uses it, so as a parameter it would not get a gradient
            module.register_buffer("mask_token", token.detach())
    missing = [weight for weight in missing if not weight.startswith("pooler.")]
    return SliceBackbone(network, options.pooling), missing


class _SliceModels(AutoModels):
    """The models for slices, which load their config."""

    kind = _KIND
    what = "vision"
    known_names = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"


def backbone_config(options: VolumeRiskOptions, folder: Path | None = None) -> Any:
    """The config of a backbone, a transformers object. For the arguments and errors see `make_backbone`."""
    return _SliceModels(options, folder).config(options.image_size)


def _has_parameters(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(True for _ in module.parameters())


def _special_tokens(network: Any) -> int:
    """Number of tokens before the patches: the class token, a distillation token, registers."""
    distillation = any(name.endswith("distillation_token") for name, _ in network.named_parameters())
    return 1 + int(distillation) + int(getattr(network.config, "num_register_tokens", 0) or 0)


def _width(config: Any) -> int:
    """Length of the vectors of the last layer."""
    sizes = getattr(config, "hidden_sizes", None)
    width: int = sizes[-1] if sizes else config.hidden_size
    return width


def set_trainable_modes(module: nn.Module, training: bool) -> None:
    """Put the frozen submodules of `module` into evaluation mode, and all others into training mode.

    A module whose parameters are all frozen is frozen, with everything inside it. A module without parameters,
    such as a dropout layer, belongs to the module that contains it.

    Args:
        training: False puts all of `module` into evaluation mode.
    """
    parameters = list(module.parameters())
    if not training or (parameters and not any(parameter.requires_grad for parameter in parameters)):
        if module.training or any(inner.training for inner in module.modules()):
            module.train(False)
        return
    module.training = True
    for child in module.children():
        set_trainable_modes(child, training)


def is_frozen(module: nn.Module) -> bool:
    """True if `module` has no trainable parameter."""
    return not any(parameter.requires_grad for parameter in module.parameters())


def dtype_of(module: nn.Module) -> torch.dtype:
    """Number format of the first parameter."""
    return next(module.parameters()).dtype
