"""Hugging Face models and tokenizers: from the hub, from a local folder, or new from architecture and sizes."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks import hugging_face
from lockstep_recipes.tasks.lora import adapters
from lockstep_recipes.tasks.readers.cache import cached, digest_of
from lockstep_recipes.tasks.text import word_piece
from lockstep_recipes.tasks.text.options import EMBEDDING_BAG, TextOptions

# The special tokens of a tokenizer that is trained here, by role. The names are those of BERT.
_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_FORMAT = 2  # of cached tokenizers
_WHAT = "sequence classification"
_SEES_ALL = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Types of models in which each token sees all tokens except padding. A test checks each of them."""


def load_tokenizer(name: str | Path, where: str = "task.model") -> Any:
    """A fast tokenizer, with a padding token.

    Args:
        where: the config key with the name.

    Raises:
        UsageError: it cannot be loaded. The error names what was looked for, and where.
    """
    transformers = _transformers()
    tokenizer = hugging_face.load(transformers.AutoTokenizer.from_pretrained, "tokenizer", name, where)
    if not tokenizer.is_fast:
        remedy = "use a model with a tokenizer.json"
        raise UsageError(f"{name} has no fast tokenizer", where=where, remedy=remedy)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            what = f"the tokenizer of {name} has neither a padding nor an end token"
            raise UsageError(what, where=where, remedy="give it a pad_token and save it")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def mask_for(model: nn.Module, mask: Tensor, has_padding: bool) -> Tensor | None:
    """The mask to pass to a model, from a mask of 0 and 1 by text and token.

    Given such a mask, transformers checks for padding in every forward pass, which waits for the device. Here this is
    already known, and the mask has the form that transformers would convert it to: None without padding.
    """
    config = getattr(model, "config", None)
    kind, attention = getattr(config, "model_type", ""), getattr(config, "_attn_implementation", "")
    if kind not in _SEES_ALL or attention != "sdpa" or getattr(config, "is_decoder", False):
        return mask
    return mask.bool()[:, None, None].expand(-1, -1, mask.shape[1], -1) if has_padding else None


def train_tokenizer(texts: Iterable[str], *, digest: str, vocab_size: int, lowercase: bool) -> Any:
    """A WordPiece tokenizer with at most about `vocab_size` tokens, trained once per machine, with the same result on
    all machines.

    Args:
        digest: the digest of the texts.
        lowercase: convert text to lower case and strip accents.
    """
    transformers = _transformers()

    def make(folder: Path) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

        normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
        special = list(_SPECIAL.values())
        tokens = word_piece.train(
            texts, normalizer=normalizer, pre_tokenizer=pre_tokenizer, size=vocab_size, special=special
        )
        numbers = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=_SPECIAL["unk_token"]))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
        tokenizer.add_special_tokens(special)
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

    key = digest_of(_FORMAT, digest, vocab_size, lowercase, version_of("tokenizers"))
    return load_tokenizer(cached("tokenizer", key, make))


def digest_of_tokenizer(tokenizer: Any) -> str:
    """A digest that is equal for tokenizers that produce the same tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {
        name: value for name, value in state.items() if name not in ("truncation", "padding")
    }  # they are from the last call
    return digest_of(json.dumps(state, sort_keys=True), tokenizer.truncation_side, version_of("tokenizers"))


def load_config(name: str | Path) -> Any:
    """A model's config.

    Raises:
        UsageError: it cannot be loaded. The error names what was looked for, and where.
    """
    return hugging_face.load(_transformers().AutoConfig.from_pretrained, "config", name)


def new_config(options: TextOptions, tokenizer: Any, *, classes: int) -> Any:
    """The config of a new model for texts of `max_length` tokens, as `options.scratch` describes it.

    The size of a bag's embeddings is the number of classes, limited to 16 to 100: a larger size does not change class
    scores.

    Raises:
        UsageError: the architecture or a key is unknown. The error lists all that are known.
    """
    _transformers()
    # A dict of names: a loop over the mapping of classes would import every architecture.
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    def defaults(kind: Any, names: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {"vocab_size": len(tokenizer)}
        if "max_position_embeddings" in names or "max_position_embeddings" in kind.attribute_map:
            values["max_position_embeddings"] = (
                options.max_length + 2
            )  # RoBERTa counts from the number of its padding token
        roles = {"pad": "pad", "bos": "cls", "eos": "sep", "cls": "cls", "sep": "sep", "decoder_start": "pad"}
        always = ("pad", "bos", "eos", "decoder_start")
        named = {role: other for role, other in roles.items() if role in always or f"{role}_token_id" in names}
        values |= {f"{role}_token_id": getattr(tokenizer, f"{other}_token_id") for role, other in named.items()}
        if is_bag:
            from lockstep_recipes.tasks.text import embedding_bag

            values["auto_map"] = dict(embedding_bag.AUTO_MAP)
            values |= {"hidden_size": min(max(classes, 16), 100), "ngram_buckets": 2**14}
        return values

    is_bag = options.scratch.architecture == EMBEDDING_BAG
    hint = "; for a different model, set task.scratch.architecture, such as bert" if is_bag else ""
    known = [EMBEDDING_BAG, *sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)]
    return hugging_face.new_config(options.scratch, known, what=_WHAT, defaults=defaults, hint=hint)


def set_labels(config: Any, labels: Sequence[str], *, multi_label: bool, pad_token_id: int) -> None:
    """Write label names, the kind of problem and the padding token into a model's config, where pipelines read them."""
    hugging_face.set_labels(config, labels, multi_label=multi_label)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad_token_id


def check_labels(config: Any, labels: Sequence[str], *, name: str, new_head: bool) -> list[str]:
    """The labels in the order of the model. See `tasks.hugging_face.check_labels`."""
    return hugging_face.check_labels(config, labels, head="ForSequenceClassification", name=name, new_head=new_head)


def make_model(options: TextOptions, config: Any, *, trained: bool) -> tuple[nn.Module, list[str]]:
    """A classifier of texts and the names of its new weights. See `tasks.hugging_face.make_model`.

    Args:
        trained: a checkpoint provides the trainable weights.
    """
    auto, lora = _transformers().AutoModelForSequenceClassification, options.lora
    name = options.model if lora or not trained else None
    dtype = adapters.DTYPES[lora.base_dtype if lora else "fp32"]
    made = hugging_face.make_model(auto, config, name, what=_WHAT, new_head=options.new_head, dtype=dtype)
    if lora is None:
        return made
    return adapters.classifier(*made, str(name), lora), [] if trained else made[1]


def save(config: Any, tokenizer: Any, max_length: int, folder: Path) -> None:
    """Write a config and a tokenizer into `folder`.

    The tokenizer's maximum length is the model's limit, or `max_length` if there is none.
    """
    config.save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = min(tokenizer.model_max_length, longest(config, tokenizer) or max_length)
    tokenizer.save_pretrained(folder)


def longest(config: Any, tokenizer: Any) -> int | None:
    """The maximum number of tokens that a model takes. None: no limit."""
    limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min((limit for limit in limits if limit and 0 < limit < 10**6), default=None)


def _transformers() -> Any:
    # Loader workers are forked later and do not tokenise. Without this variable, `tokenizers` warns about each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers = hugging_face.import_transformers("text", "text")
    from lockstep_recipes.tasks.text import embedding_bag

    embedding_bag.register()
    return transformers


def version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)
