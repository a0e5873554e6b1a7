"""What tasks on images ask of pretrained models of transformers before they make a model."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import UsageError
from lockstep.sources.hub import offline_without_network


class Pixels(NamedTuple):
    """What a model expects of pictures."""

    size: int
    """Height and width in pixels."""
    mean: list[float] | None
    """Mean of each channel, from 0 to 1. None: the model does not say."""
    std: list[float] | None
    """Standard deviation of each channel. None: the model does not say."""


def processor_of(model: str | None) -> dict[str, Any]:
    """What the image processor of a pretrained model says. Empty without a model, or if it has no such file."""
    if model is None:
        return {}
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        with contextlib.nullcontext() if Path(model).is_dir() else offline_without_network():
            said: dict[str, Any] = mixin.get_image_processor_dict(model)[0]
    except OSError:
        return {}
    return said


def side_of(size: Any, *, keys: Sequence[str] = ("shortest_edge", "height"), default: int) -> int:
    """The side in pixels that a size of transformers means: a number, a list, or a dict with one of `keys`."""
    if isinstance(size, dict):
        size = next((size[key] for key in keys if size.get(key)), None)
    if isinstance(size, list | tuple):
        size = size[0]
    return int(size or default)


def check_channels(config: Any, channels: int) -> None:
    """Compare the channels of a model with those of the pictures.

    Args:
        config: of a model of transformers.

    Raises:
        UsageError: they differ.
    """
    places = (config, getattr(config, "backbone_config", None))
    wanted = next((place.num_channels for place in places if hasattr(place, "num_channels")), channels)
    if wanted != channels:
        what = f"the model takes pictures of {wanted} channels, and task.channels is {channels}"
        raise UsageError(what, where="task.channels", remedy=f"set task.channels={wanted}")
