"""Language models by name, by config, or Lockstep's own, and a common way to call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError, did_you_mean
from lockstep_recipes.tasks import hugging_face
from lockstep_recipes.tasks.lm.attention import document_mask, finds_documents
from lockstep_recipes.tasks.lm.model import SmallModel
from lockstep_recipes.tasks.lm.options import LmOptions, SmallOptions
from lockstep_recipes.tasks.lora import adapters
from lockstep_recipes.tasks.text import hugging_face as text_models

PLAIN_HEADS = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3")
"""Transformers models whose logits are exactly the output of their last layer."""
_WHAT = "language"
_LEAK = 1e-3  # fraction of the largest logit. Rounding in float32 gives 1e-5; a model that sees other documents, 1e-1


def import_transformers() -> Any:
    """The module `transformers`.

    Raises:
        UsageError: it is not installed.
    """
    return hugging_face.import_transformers("lm", "text")


def small_config(sizes: SmallOptions, tokenizer: Any, length: int) -> Any:
    """The config of Lockstep's small model, in the form of transformers' Llama."""
    return import_transformers().LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.width,
        intermediate_size=sizes.inner_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.shared_heads,
        max_position_embeddings=length,
        tie_word_embeddings=sizes.tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
    )


def new_config(wanted: str | dict[str, Any], tokenizer: Any, length: int) -> Any:
    """The config of a new transformers model, for the vocabulary of a tokenizer and rows of `length` tokens.

    Args:
        wanted: a name or folder, or keys of a config with `model_type`.

    Raises:
        UsageError: there is no such config or model type, or a key or value is not valid for it.
    """
    transformers = import_transformers()
    sizes = {} if isinstance(wanted, str) else {key: value for key, value in wanted.items() if key != "model_type"}
    if isinstance(wanted, str):
        config = text_models.load_config(wanted)
    else:
        known = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        kind = wanted.get("model_type")
        if kind not in known:
            remedy = f"{did_you_mean(kind, known)}there are: {', '.join(known)}"
            raise UsageError(f"no language model of type {kind!r}", where="task.config.model_type", remedy=remedy)
        try:
            config = transformers.CONFIG_MAPPING[kind](**sizes)
        except Exception as error:
            remedy = f"give sizes that suit {kind}"
            raise UsageError(f"{type(error).__name__}: {error}", where="task.config", remedy=remedy) from error
        unknown = [key for key in sizes if key not in type(config)().to_dict() and key not in config.attribute_map]
        if unknown:
            remedy = f"{did_you_mean(unknown[0], type(config)().to_dict())}see the config of {kind} in transformers"
            raise UsageError(f"unknown key {unknown[0]!r}", where="task.config", remedy=remedy)
        limit = most_tokens(config)
        if limit is not None and limit < length and not {"n_positions", "max_position_embeddings"} & {*sizes}:
            config.max_position_embeddings = length
    config.vocab_size = max(len(tokenizer), sizes.get("vocab_size", 0))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = None  # otherwise the embedding of the padding token would not be trained
    return config


def vocabulary(config: Any) -> int:
    """The vocabulary size of a model."""
    return int(config.get_text_config().vocab_size)


def most_tokens(config: Any) -> int | None:
    """The maximum number of positions of a model. None: no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def make_model(options: LmOptions, config: Any, *, trained: bool) -> tuple[nn.Module, list[str]]:
    """A language model, with trainable weights in float32, and the names of the weights that the pretrained model
    lacks.

    Args:
        trained: a checkpoint provides the weights.

    Raises:
        UsageError: the weights cannot be loaded.
    """
    if options.is_small:
        return SmallModel(config, options.small.dropout), []
    transformers = import_transformers()
    lora, auto = options.lora, transformers.AutoModelForCausalLM
    if lora is None:
        name = None if trained else options.model
        return hugging_face.make_model(auto, config, name, what=_WHAT, new_head=False)
    dtype = adapters.DTYPES[lora.base_dtype]
    made = hugging_face.make_model(auto, config, options.model, what=_WHAT, new_head=False, dtype=dtype)
    return adapters.adapt(*made, options, lora), []


def cut_tokens(model: Any) -> None:
    """Change the plan of a model so that the ranks of a tensor group shard the tokens inside its blocks (sequence
    parallelism).

    Attention in transformers depends on the shape of its input, so it gets all tokens.

    Raises:
        UsageError: the model has no plan, or its plan has no layers in repeated blocks.
    """
    plan = dict(getattr(model, "_tp_plan", None) or {})
    cut = [pattern.partition(".*.") for pattern, style in plan.items() if style == "colwise" and ".*." in pattern]
    for list_of_blocks, _, inside in cut:
        parent = inside.rpartition(".")[0]
        plan[f"{list_of_blocks}.*"] = "sequence_parallel"
        if "att" in parent:
            plan[f"{list_of_blocks}.*.{parent}"] = "sequence_gather"
    if not cut:
        what, remedy = f"{type(model).__name__} has no tensor-parallel plan for its blocks", "set task.cut_tokens=false"
        raise UsageError(what, where="task.cut_tokens", remedy=remedy)
    model._tp_plan = plan


def called(model: nn.Module, ids: Tensor, positions: Tensor | None = None, mask: Any = None, **options: Any) -> Any:
    """The output of a model: `logits`, and `past_key_values` if requested.

    Args:
        ids, positions: (samples, tokens). No positions: a row is one document.
        mask: (samples, 1, tokens, tokens seen), true if a token sees another. None: each token sees itself and all
            earlier tokens.
        options: `past_key_values` and `use_cache`.
    """
    given = {} if positions is None else {"position_ids": positions}
    if mask is not None and not (finds_documents(model) and not options):
        if getattr(getattr(model, "config", None), "_attn_implementation", "sdpa") == "eager":  # it adds the mask
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
        given["attention_mask"] = mask
    # In training, such a model finds documents by their positions. A mask would replace its windows.
    return model(input_ids=ids, **given, **{"use_cache": False, **options})


def hidden_and_head(
    model: Any, ids: Tensor, positions: Tensor | None = None, mask: Any = None
) -> tuple[Tensor, nn.Linear]:
    """The input of the last layer, (samples, tokens, width), and the last layer. For the arguments, see `called`."""
    if isinstance(model, SmallModel):
        return model.model(ids, positions, mask), model.lm_head
    return called(model.base_model, ids, positions, mask).last_hidden_state, model.get_output_embeddings()


def check_lengths(config: Any, length: int, packing: bool) -> None:
    """Check that documents in rows of `length` tokens get the same logits in any batch.

    Raises:
        UsageError: transformers chunks attention by the position in a row, or chooses rotations by the longest
            document.
    """
    text = config.get_text_config()
    chunk = getattr(text, "attention_chunk_size", None)
    if packing and chunk and chunk < length:
        what = f"attention of {text.model_type} works on chunks of {chunk} tokens, counted from the start of a row"
        raise UsageError(what, where="task.packing", remedy=f"set task.packing=false, or task.length={chunk}")
    rotations = getattr(text, "rope_parameters", None) or {}
    limit = rotations.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if rotations.get("rope_type") in ("longrope", "dynamic") and limit and limit < length:
        what = f"positions of {text.model_type} beyond {limit} depend on the longest document of a batch"
        raise UsageError(what, where="task.length", remedy=f"use at most {limit}")


def check_causal(model: nn.Module, vocab_size: int, name: str) -> None:
    """Compare the logits of tokens before two different last tokens.

    Raises:
        UsageError: they differ: a token sees the token that it is to predict.
    """
    ids = (torch.arange(7) * 7 % vocab_size).repeat(2, 1)
    ids[1, -1] = (ids[0, -1] + 1) % vocab_size
    was_training = model.training
    with torch.no_grad():
        one, other = called(model.eval(), ids).logits[:, :-1]
    model.train(was_training)
    # Masked tokens contribute exact zeros. A new model that sees the token shows only a small difference.
    if not (one - other).abs().max() <= max(1e-5, torch.finfo(one.dtype).eps) * one.abs().max():
        what = f"{name} is not causal: a token sees later tokens"
        raise UsageError(what, where="task.model", remedy="use a causal model (some have is_decoder in their config)")


def check_head(model: nn.Module, vocab_size: int, name: str) -> None:
    """Compare the logits of a model with those of its last layer.

    Raises:
        UsageError: they differ, or the model has no such layer, so its loss cannot be computed in chunks.
    """
    ids = torch.arange(7)[None] * 7 % vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            theirs = called(model, ids).logits
            hidden, head = hidden_and_head(model, ids)
            own = head(hidden)
        is_same = own.shape == theirs.shape and torch.allclose(own, theirs, rtol=_LEAK, atol=_LEAK)
        is_same &= isinstance(head, nn.Linear)  # adapters would need their own gradients
    except (AttributeError, TypeError, RuntimeError):
        is_same = False
    finally:
        model.train(was_training)
    if not is_same:
        remedy = "set task.loss_chunk=null"
        raise UsageError(
            f"{name} computes its logits with more than its last layer", where="task.loss_chunk", remedy=remedy
        )


def check_no_leak(model: nn.Module, vocab_size: int, name: str, masked: bool = True) -> None:
    """Compare the logits of two documents in one row with those of each document in its own row.

    Args:
        masked: the model gets a mask. Otherwise it must find the documents by their positions.

    Raises:
        UsageError: they differ, so this model cannot be trained on packed rows.
    """
    sizes = [3, 4]
    ids = torch.arange(sum(sizes))[None] * 7 % vocab_size
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))[None]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            together = called(model, ids, positions, document_mask(documents) if masked else None).logits
            alone = torch.cat([called(model, part).logits for part in torch.split(ids, sizes, dim=1)], dim=1)
        apart = float((together - alone).abs().max() / alone.abs().max())
    except (TypeError, ValueError, RuntimeError, IndexError) as error:  # the model does not take positions, or a mask
        apart = float("nan")
        reason = f"it cannot be called with documents in one row: {type(error).__name__}: {error}"
    else:
        reason = f"a token sees other documents of its row: its logits differ by {apart:.2g} of the largest"
    finally:
        model.train(was_training)
    if not apart <= _LEAK:
        remedy = "set task.packing=false, which pads rows instead"
        raise UsageError(f"{name} cannot be packed: {reason}", where="task.packing", remedy=remedy)
