"""Hugging Face models and tokenizers: from the hub, from a local folder, or new by architecture and sizes."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.cache import cached, digest_of
from lockstep.errors import UsageError, did_you_mean
from lockstep.tasks.text.options import EMBEDDING_BAG

# The special tokens of a tokenizer that is trained here, by role. They have the names of BERT's tokens.
_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_SHOWN = 8


def load_tokenizer(name: str | Path) -> Any:
    """A fast tokenizer, with a padding token.

    Raises:
        UsageError: it cannot be loaded. The error says what was looked for, and where.
    """
    transformers = _transformers()
    tokenizer = _load(transformers.AutoTokenizer.from_pretrained, "tokenizer", name)
    if not tokenizer.is_fast:
        raise UsageError(
            f"{name} has no fast tokenizer", where="task.model", remedy="use a model with a tokenizer.json"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UsageError(
                f"the tokenizer of {name} has neither a padding nor an end token",
                where="task.model",
                remedy="give it a pad_token and save it",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], *, digest: str, vocab_size: int, lowercase: bool) -> Any:
    """A WordPiece tokenizer of at most `vocab_size` tokens, trained once per machine.

    Args:
        digest: of the texts.
        lowercase: turn letters into lower case and drop accents.
    """
    transformers = _transformers()

    def make(folder: Path) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        tokenizer = Tokenizer(models.WordPiece(unk_token=_SPECIAL["unk_token"]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(
            texts,
            trainers.WordPieceTrainer(
                vocab_size=vocab_size, special_tokens=list(_SPECIAL.values()), show_progress=False
            ),
        )
        cls, sep = _SPECIAL["cls_token"], _SPECIAL["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
        )
        names = ["input_ids", "token_type_ids", "attention_mask"]
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_input_names=names, **_SPECIAL
        ).save_pretrained(folder)

    return load_tokenizer(cached("tokenizer", digest_of(digest, vocab_size, lowercase, _version("tokenizers")), make))


def digest_of_tokenizer(tokenizer: Any) -> str:
    """A digest that is equal for tokenizers that make the same tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {name: value for name, value in state.items() if name not in ("truncation", "padding")}  # of the last call
    return digest_of(json.dumps(state, sort_keys=True), tokenizer.truncation_side, _version("tokenizers"))


def load_config(name: str | Path) -> Any:
    """A model's config.

    Raises:
        UsageError: it cannot be loaded. The error says what was looked for, and where.
    """
    return _load(_transformers().AutoConfig.from_pretrained, "config", name)


def new_config(architecture: str, *, sizes: Mapping[str, Any], max_length: int, tokenizer: Any) -> Any:
    """The config of a new model.

    Args:
        architecture: `embedding_bag`, or a model type of transformers, such as `bert`.
        sizes: keys of the architecture's config, such as `hidden_size`.
        max_length: the longest text in tokens.

    Raises:
        UsageError: the architecture or a key is unknown. The error lists all that are known.
    """
    transformers = _transformers()
    # A dict of names: a loop over the mapping of classes would import every architecture.
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    classifiers = [EMBEDDING_BAG, *sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)]
    if architecture not in classifiers:
        remedy = f"{did_you_mean(architecture, classifiers)}there are: {', '.join(classifiers)}"
        raise UsageError(
            f"no sequence classification model of type {architecture!r}",
            where="task.scratch.architecture",
            remedy=remedy,
        )
    kind = transformers.CONFIG_MAPPING[architecture]
    names = [key for key in inspect.signature(kind).parameters if key not in ("self", "kwargs", "args")]
    for key in sizes:
        if key not in names and key not in kind.attribute_map:
            remedy = f"{did_you_mean(key, names)}{kind.__name__} takes: {', '.join(names)}"
            if architecture == EMBEDDING_BAG:
                remedy += "; for another model, set task.scratch.architecture, such as bert"
            raise UsageError("unknown key", where=f"task.scratch.sizes.{key}", remedy=remedy)
    defaults: dict[str, Any] = {"vocab_size": len(tokenizer)}
    if "max_position_embeddings" in names or "max_position_embeddings" in kind.attribute_map:
        defaults["max_position_embeddings"] = max_length + 2  # RoBERTa counts positions from its padding token's number
    roles = {"pad": "pad", "bos": "cls", "eos": "sep", "cls": "cls", "sep": "sep", "decoder_start": "pad"}
    always = ("pad", "bos", "eos", "decoder_start")
    named = {role: other for role, other in roles.items() if role in always or f"{role}_token_id" in names}
    defaults |= {f"{role}_token_id": getattr(tokenizer, f"{other}_token_id") for role, other in named.items()}
    if architecture == EMBEDDING_BAG:
        from lockstep.tasks.text import embedding_bag

        defaults["auto_map"] = dict(embedding_bag.AUTO_MAP)
    try:
        return kind(**{**defaults, **sizes})
    except Exception as error:
        raise UsageError(
            f"{type(error).__name__}: {error}",
            where="task.scratch.sizes",
            remedy=f"give sizes that suit {kind.__name__}",
        ) from error


def set_labels(config: Any, labels: Sequence[str], *, multi_label: bool, pad_token_id: int) -> None:
    """Write label names, the kind of problem and the padding token into a model's config, where pipelines read them."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "multi_label_classification" if multi_label else "single_label_classification"
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad_token_id


def check_labels(config: Any, labels: Sequence[str], *, name: str, new_head: bool) -> list[str]:
    """The labels in the order that the model has. If the model does not classify, or has other names: `labels` as they
    are.

    Raises:
        UsageError: the model classifies into another number of classes, and its last layer is not replaced.
    """
    classifies = any("ForSequenceClassification" in architecture for architecture in config.architectures or [])
    if not classifies or new_head:
        return list(labels)
    theirs = [config.id2label[number] for number in range(config.num_labels)]
    if len(theirs) != len(labels):
        classes = f"{name} classifies into {len(theirs)} labels ({_listed(theirs)})"
        raise UsageError(
            f"{classes}, the data has {len(labels)} ({_listed(labels)})",
            where="task.model",
            remedy="set task.new_head=true to replace its last layer, or use data with its labels",
        )
    return theirs if set(theirs) == set(labels) else list(labels)


def make_model(config: Any, name: str | None, *, new_head: bool) -> tuple[nn.Module, list[str]]:
    """A classifier with pretrained weights, or a new classifier.

    Args:
        name: the pretrained model. None: all weights are new.
        new_head: replace the last layer of the pretrained model. A missing last layer is always new.

    Returns:
        the model, and the names of the weights that the pretrained model lacks.

    Raises:
        UsageError: the weights cannot be loaded, or belong to another architecture.
    """
    transformers = _transformers()
    auto = transformers.AutoModelForSequenceClassification
    on_meta = torch.empty(0).device.type == "meta"  # with FSDP, only rank 0 needs values
    try:
        if name is None or on_meta:
            return auto.from_config(config, dtype=torch.float32), []
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # no warning about the new last layer, which is intended
        try:
            # float32, also if the file holds half precision: updates of half-precision weights vanish in rounding.
            options = {
                "config": config,
                "dtype": torch.float32,
                "ignore_mismatched_sizes": new_head,
                "output_loading_info": True,
            }
            model, info = _load(auto.from_pretrained, "model", name, **options)
        finally:
            transformers.logging.set_verbosity(before)
    except (ValueError, KeyError) as error:
        kind = getattr(config, "model_type", type(config).__name__)
        raise UsageError(
            f"transformers has no sequence classification for {kind!r}: {_first_line(error)}",
            where="task.model",
            remedy="use another model",
        ) from error
    missing = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    body = [weight for weight in model.state_dict() if weight.startswith(f"{model.base_model_prefix}.")]
    if body and set(body) <= set(missing):
        others = _listed(sorted(info["unexpected_keys"])) or "no other weights"
        what = f"{name} has none of the weights of {type(model).__name__}; it has: {others}"
        raise UsageError(what, where="task.model", remedy="use the folder or name of a model of this architecture")
    return model, missing


def save(config: Any, tokenizer: Any, *, max_length: int, folder: Path) -> None:
    """Write a config and a tokenizer into `folder`.

    The tokenizer's longest text is the model's limit, else `max_length`.
    """
    config.save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = min(tokenizer.model_max_length, longest(config, tokenizer) or max_length)
    tokenizer.save_pretrained(folder)


def save_for_pipeline(model: Any, tokenizer: Any, *, max_length: int, folder: Path) -> None:
    """Write the config of `model`, with the name of its class, and the tokenizer into `folder`."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    save(config, tokenizer, max_length=max_length, folder=folder)


def longest(config: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that a model takes. None: it has no limit."""
    limits = [
        limit
        for limit in (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
        if limit and 0 < limit < 10**6
    ]
    return min(limits, default=None)


def _load(load: Callable[..., Any], what: str, name: str | Path, **options: Any) -> Any:
    transformers = _transformers()
    transformers.logging.disable_progress_bar()
    try:
        return load(str(name), **options)
    except Exception as error:
        from huggingface_hub import constants

        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        if Path(name).is_dir():
            place = f"in the folder {name}, which has: {_listed(sorted(file.name for file in Path(name).iterdir()))}"
        else:
            hub = f"in the cache {constants.HF_HUB_CACHE}, and at {constants.ENDPOINT}{offline}"
            place = f"as a folder {os.path.abspath(name)}, {hub}"
        remedy = "check the name; offline, give the folder of a model that `save_pretrained` wrote"
        raise UsageError(
            f"the {what} of {str(name)!r} cannot be loaded; looked for {place}: {_first_line(error)}",
            where="task.model",
            remedy=remedy,
        ) from error


def _transformers() -> Any:
    # Loader workers are forked later and do not tokenise. Without this variable, `tokenizers` warns about each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "transformers is not installed", where="task.kind: text", remedy="pip install 'torch-lockstep[text]'"
        ) from error
    from lockstep.tasks.text import embedding_bag

    embedding_bag.register()
    return transformers


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
