"""Hugging Face models for any kind of classification: from the hub, from a local folder, or new from an
architecture."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.foreign_errors import first_line, optional
from lockstep_recipes.tasks.readers.hub import offline_without_network
from lockstep_recipes.tasks.vision.readers.class_table import listed

PROCESSOR = "preprocessor_config.json"
OTHER_LAYERS = "config_of_other_layers.json"
"""The file name of the config of an exported model that transformers cannot build."""


def import_transformers(kind: str, extra: str) -> Any:
    """The module `transformers`.

    Args:
        kind: the kind of task that needs it, for the error message.
        extra: the extra of this package that installs it.

    Raises:
        UsageError: it is not installed.
    """
    remedy = f"pip install transformers; in the clone of Lockstep: pip install -e '.[{extra}]'"
    what, where = "transformers is not installed", f"task.kind: {kind}"
    return optional("transformers", what, where=where, remedy=remedy, kind=UsageError)


def load(loading: Callable[..., Any], what: str, name: str | Path, where: str = "task.model", **options: Any) -> Any:
    """`loading(name, **options)`, where `loading` is a function `from_pretrained` of transformers.

    Args:
        what: what is loaded, for the error message.
        where: the config key with the name.

    Raises:
        UsageError: it cannot be loaded. The error names what was looked for, and where.
    """
    transformers: Any = importlib.import_module("transformers")

    transformers.logging.disable_progress_bar()
    folder = Path(name).is_dir()
    offline = ""
    try:
        with contextlib.nullcontext("") if folder else offline_without_network() as offline:
            return loading(str(name), **options)
    except Exception as error:
        from huggingface_hub import constants

        if folder:
            place = f"in the folder {name}, which has: {listed(sorted(file.name for file in Path(name).iterdir()))}"
        else:
            hub = f"in the cache {constants.HF_HUB_CACHE}, and at {constants.ENDPOINT}{offline}"
            place = f"as a folder {os.path.abspath(name)}, {hub}"
        remedy = "check the name; offline, give the folder of a model that `save_pretrained` wrote"
        what = f"the {what} of {str(name)!r} cannot be loaded; looked for {place}: {first_line(error)}"
        raise UsageError(what, where=where, remedy=remedy) from error


def new_config(
    scratch: Any,
    known: Sequence[str],
    *,
    what: str,
    defaults: Callable[[Any, Sequence[str]], Mapping[str, Any]],
    hint: str = "",
) -> Any:
    """The config of a new model.

    Args:
        scratch: its `architecture` is a model type of transformers, such as `bert`, and its `sizes` are keys of the
            architecture's config, such as `hidden_size`.
        known: the available model types.
        what: what they do, for the error message.
        defaults: called with the config's class and the names of its keys, returns values of keys that `sizes` lacks.
        hint: text added to the remedy for an unknown key.

    Raises:
        UsageError: the architecture or a key is unknown. The error lists all that are known.
    """
    transformers: Any = importlib.import_module("transformers")
    architecture, sizes = scratch.architecture, scratch.sizes
    if architecture not in known:
        remedy = f"{did_you_mean(architecture, known)}there are: {', '.join(known)}"
        raise UsageError(f"no {what} model of type {architecture!r}", where="task.scratch.architecture", remedy=remedy)
    kind = transformers.CONFIG_MAPPING[architecture]
    names = [key for key in inspect.signature(kind).parameters if key not in ("self", "kwargs", "args")]
    for key in sizes:
        if key not in names and key not in kind.attribute_map:
            remedy = f"{did_you_mean(key, names)}{kind.__name__} takes: {', '.join(names)}{hint}"
            raise UsageError("unknown key", where=f"task.scratch.sizes.{key}", remedy=remedy)
    try:
        return kind(**{**defaults(kind, names), **sizes})
    except Exception as error:
        remedy = f"give sizes that suit {kind.__name__}"
        raise UsageError(f"{type(error).__name__}: {error}", where="task.scratch.sizes", remedy=remedy) from error


def set_labels(config: Any, labels: Sequence[str], *, multi_label: bool = False) -> None:
    """Write label names and the kind of problem into a model's config, where pipelines read them."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "multi_label_classification" if multi_label else "single_label_classification"


def check_labels(config: Any, labels: Sequence[str], *, head: str, name: str, new_head: bool) -> list[str]:
    """The labels in the order of the model. If the model does not classify, or has different names, `labels` unchanged.

    Args:
        head: a substring of the names of classifier classes, such as `ForSequenceClassification`.
        name: the model's name, for the error message.
        new_head: whether the model's last layer is replaced.

    Raises:
        UsageError: the model has a different number of classes, and its last layer is not replaced.
    """
    classifies = any(head in architecture for architecture in config.architectures or [])
    if not classifies or new_head:
        return list(labels)
    theirs = [config.id2label[number] for number in range(config.num_labels)]
    if len(theirs) != len(labels):
        classes = f"{name} classifies into {len(theirs)} labels ({listed(theirs)})"
        remedy = "set task.new_head=true to replace its last layer, or use data with these labels"
        raise UsageError(f"{classes}, the data has {len(labels)} ({listed(labels)})", where="task.model", remedy=remedy)
    return theirs if set(theirs) == set(labels) else list(labels)


def make_model(
    auto: Any, config: Any, name: str | None, *, what: str, new_head: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, list[str]]:
    """A classifier with pretrained weights, or a new classifier.

    Args:
        auto: a class of transformers such as `AutoModelForSequenceClassification`.
        name: the pretrained model. None: all weights are new.
        what: what the model does, for the error message. new_head: replace the last layer of the pretrained model. A
            missing last layer is always new.
        dtype: the number format of the weights. In half precision, small updates are lost to rounding.

    Returns:
        the model, and the names of the weights that the pretrained model lacks.

    Raises:
        UsageError: the weights cannot be loaded, or belong to a different architecture.
    """
    transformers: Any = importlib.import_module("transformers")

    on_meta = torch.empty(0).device.type == "meta"  # with FSDP, only rank 0 needs values
    try:
        if name is None or on_meta:
            return auto.from_config(config, dtype=dtype), []
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # no warning about the new last layer, which is intended
        try:
            options = {"config": config, "dtype": dtype, "ignore_mismatched_sizes": new_head}
            model, info = load(auto.from_pretrained, "model", name, output_loading_info=True, **options)
        finally:
            transformers.logging.set_verbosity(before)
    except (ValueError, KeyError) as error:
        kind = getattr(config, "model_type", type(config).__name__)
        what = f"transformers has no {what} for {kind!r}: {first_line(error)}"
        raise UsageError(what, where="task.model", remedy="use a different model") from error
    missing = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    body = [weight for weight in model.state_dict() if weight.startswith(f"{model.base_model_prefix}.")]
    if body and set(body) <= set(missing):
        others = listed(sorted(info["unexpected_keys"])) or "no other weights"
        what = f"{name} has none of the weights of {type(model).__name__}; it has: {others}"
        raise UsageError(what, where="task.model", remedy="use the folder or name of a model of this architecture")
    return model, missing


def save_for_image_pipeline(model: Any, processor: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the configs of a model and of its image processor, which `transformers.pipeline` reads.

    transformers builds the model from the config. If that resulted in different layers (BatchNorm instead of
    GroupNorm), it would initialise them, and only log this. In that case the config gets a different name, so that
    transformers does not find it.

    Args:
        processor: keys of `preprocessor_config.json`.
        folder: where the weights will be.

    Returns:
        warnings for the user.
    """
    warnings = []
    if len(processor["image_mean"]) == 1:
        warnings.append(
            "transformers.pipeline converts every image to RGB, but this model takes grey images. Use "
            "AutoImageProcessor and the model directly, with grey images (PIL mode L)"
        )
    with torch.device("meta"):
        theirs = type(model)(copy.deepcopy(model.config)).state_dict()
    missing = sorted(theirs.keys() - model.state_dict().keys())
    (folder / PROCESSOR).write_text(json.dumps(processor, indent=1))
    if not missing:
        config_for_pipeline(model).save_pretrained(folder)
        return warnings
    (folder / OTHER_LAYERS).write_text(config_for_pipeline(model).to_json_string())
    return [
        *warnings,
        f"transformers cannot load this model: its {type(model).__name__} has {missing[0]}, which this model lacks. "
        f"The config is therefore named {OTHER_LAYERS}; lockstep --explain images shows how to load it. Models trained "
        "with task.batch_norm=batch, sync or frozen load as usual; model.pt2 and use_model.py do not need transformers",
    ]


def config_for_pipeline(model: Any) -> Any:
    """The config of `model` with the name of its class, which `transformers.pipeline` needs."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [
        type(getattr(model, "get_base_model", lambda: model)()).__name__
    ]  # the model inside peft's model
    return config
