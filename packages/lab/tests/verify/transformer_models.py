"""Small, new models of many families of the package `transformers`, each with a right task for `lockstep verify`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task

WORDS, LENGTH, CLASSES, SIDE = 24, 16, 4, 32
OVERRIDES = ("optim.lr=0.005", "batch.global=16", "device=cpu", "optim.weight_decay=0")

# What configs call the sizes of a model. A config gets those that it knows.
_SMALL: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "head_hidden_size"), 32)
    | dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 64)
    | dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4)
    | dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads",), 2)
    | dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 8)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 64)
    | {"vocab_size": WORDS, "state_size": 8, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    | {"image_size": SIDE, "patch_size": 8, "num_channels": 3, "num_labels": CLASSES, "use_cache": False}
    | dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0)  # layers without gradient, by chance
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "attention_window": 8}
)

_TEXT, _CAUSAL, _PAIRS, _IMAGES = "MaskedLM", "CausalLM", "Seq2SeqLM", "ImageClassification"
_HYBRID: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
_STAGES: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2}

_LARGE = 64
"""The side of pictures for families that halve them so often that less would leave a single place."""
_UNUSED = ("pooler", "contact_head", "cls.predictions.dense.weight", "_global", "mask_emb", "seg_embed", "r_s_bias")
_UNUSED += ("mask_token", "vision_model.head", "stages.2.layers.0.module.attention_biases", "w_g")
"""In names of parameters that get no gradient in such a training, and are frozen. w_g of swiftformer never gets one: a
softmax of a single number is behind it."""

_SOME_UNUSED = ("switch_transformers",)
"""Families with experts that get no word of some batches, and so no gradient."""

# By family: what it predicts, and what its config has besides the small sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # encoders
    "albert": (_TEXT, {}),
    "bert": (_TEXT, {}),
    "big_bird": (_TEXT, {"attention_type": "original_full"}),
    "camembert": (_TEXT, {}),
    "convbert": (_TEXT, {}),
    "data2vec-text": (_TEXT, {}),
    "deberta": (_TEXT, {}),
    "deberta-v2": (_TEXT, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": (_TEXT, {"hidden_dim": 64}),
    "electra": (_TEXT, {}),
    "ernie": (_TEXT, {}),
    "esm": (_TEXT, {"token_dropout": False, "mask_token_id": 3}),
    "eurobert": (_TEXT, {}),
    "fnet": (_TEXT, {}),
    "megatron-bert": (_TEXT, {}),
    "mobilebert": (_TEXT, {"intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "modernbert": (_TEXT, {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}),
    "mpnet": (_TEXT, {}),
    "nomic_bert": (_TEXT, {}),
    "nystromformer": (_TEXT, {"num_landmarks": 4, "segment_means_seq_len": LENGTH}),
    "rembert": (_TEXT, {"input_embedding_size": 32, "output_embedding_size": 32}),
    "roberta": (_TEXT, {}),
    "roformer": (_TEXT, {}),
    "squeezebert": (_TEXT, {}),
    "xlm-roberta": (_TEXT, {}),
    # decoders
    "apertus": (_CAUSAL, {}),
    "biogpt": (_CAUSAL, {}),
    "bitnet": (_CAUSAL, {}),
    "bloom": (_CAUSAL, {}),
    "codegen": (_CAUSAL, {"rotary_dim": 4}),
    "cohere": (_CAUSAL, {}),
    "cohere2": (_CAUSAL, {}),
    "ctrl": (_CAUSAL, {"dff": 64}),
    "diffllama": (_CAUSAL, {}),
    "exaone4": (_CAUSAL, {}),
    "falcon": (_CAUSAL, {}),
    "gemma": (_CAUSAL, {}),
    "gemma2": (_CAUSAL, {"query_pre_attn_scalar": 8}),
    "gemma3_text": (_CAUSAL, {"query_pre_attn_scalar": 8}),
    "glm": (_CAUSAL, {}),
    "gpt2": (_CAUSAL, {}),
    "gpt_bigcode": (_CAUSAL, {}),
    "gpt_neo": (_CAUSAL, {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": (_CAUSAL, {}),
    "gptj": (_CAUSAL, {"rotary_dim": 4}),
    "granite": (_CAUSAL, {}),
    "helium": (_CAUSAL, {}),
    "lfm2": (_CAUSAL, {"block_ff_dim": 64, "layer_types": ["conv", "full_attention"]}),
    "llama": (_CAUSAL, {}),
    "mistral": (_CAUSAL, {}),
    "mpt": (_CAUSAL, {"expansion_ratio": 2}),
    "nemotron": (_CAUSAL, {}),
    "olmo": (_CAUSAL, {}),
    "olmo2": (_CAUSAL, {}),
    "opt": (_CAUSAL, {"word_embed_proj_dim": 32}),
    "persimmon": (_CAUSAL, {}),
    "phi": (_CAUSAL, {}),
    "phi3": (_CAUSAL, {}),
    "qwen2": (_CAUSAL, {}),
    "qwen3": (_CAUSAL, {}),
    "smollm3": (_CAUSAL, {}),
    "stablelm": (_CAUSAL, {}),
    "starcoder2": (_CAUSAL, {}),
    "xglm": (_CAUSAL, {"attention_heads": 4}),
    # mixtures of experts
    "deepseek_v2": (_CAUSAL, _DEEPSEEK),
    "deepseek_v3": (_CAUSAL, _DEEPSEEK),
    "gpt_oss": (_CAUSAL, {}),
    "granitemoe": (_CAUSAL, {}),
    "mixtral": (_CAUSAL, {}),
    "olmoe": (_CAUSAL, {}),
    "phimoe": (_CAUSAL, {}),
    "qwen2_moe": (_CAUSAL, {}),
    "qwen3_moe": (_CAUSAL, {}),
    # state spaces and recurrences
    "bamba": (_CAUSAL, {**_HYBRID, "attn_layer_indices": [1]}),
    "falcon_mamba": (_CAUSAL, {}),
    "jamba": (_CAUSAL, {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False}),
    "mamba": (_CAUSAL, {}),
    "mamba2": (_CAUSAL, {"head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8}),
    "recurrent_gemma": (_CAUSAL, {"lru_width": 32, "attention_window_size": 8}),
    "rwkv": (_CAUSAL, {"attention_hidden_size": 32}),
    "xlnet": (_CAUSAL, {"d_inner": 64}),
    # encoders with decoders
    "bart": (_PAIRS, {}),
    "bigbird_pegasus": (_PAIRS, {"attention_type": "original_full"}),
    "blenderbot": (_PAIRS, {}),
    "led": (_PAIRS, {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}),
    "longt5": (_PAIRS, {"local_radius": 3}),
    "m2m_100": (_PAIRS, {}),
    "marian": (_PAIRS, {}),
    "mbart": (_PAIRS, {}),
    "mt5": (_PAIRS, {}),
    "nllb-moe": (
        _PAIRS,
        {"num_experts": 2, "expert_capacity": 1000, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    "pegasus": (_PAIRS, {}),
    "plbart": (_PAIRS, {}),
    "switch_transformers": (
        _PAIRS,
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0},
    ),
    "t5": (_PAIRS, {}),
    "umt5": (_PAIRS, {}),
    # pictures
    "beit": (_IMAGES, {"out_indices": [1]}),
    "bit": (_IMAGES, {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8}),
    "convnext": (_IMAGES, {**_STAGES, "patch_size": 4}),
    "convnextv2": (_IMAGES, {**_STAGES, "patch_size": 4}),
    "data2vec-vision": (_IMAGES, {"out_indices": [1]}),
    "deit": (_IMAGES, {}),
    "dinov2": (_IMAGES, {"mlp_ratio": 2}),
    "efficientnet": (
        _IMAGES,
        {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320, "initializer_range": 0.2},
    ),
    "focalnet": (_IMAGES, {"embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]}),
    "hiera": (
        _IMAGES,
        {
            "embed_dim": 16,
            "image_size": [32, 32],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "depths": [1, 1],
            "num_heads": [1, 2],
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
            "query_stride": [2, 2],
            "num_query_pool": 1,
        },
    ),
    "levit": (
        _IMAGES,
        {
            "image_size": _LARGE,
            "patch_size": 16,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "mobilenet_v1": (_IMAGES, {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1}),
    "mobilenet_v2": (_IMAGES, {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1}),
    "mobilevit": (
        _IMAGES,
        {
            "image_size": _LARGE,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "patch_size": 2,
            "output_stride": 16,
        },
    ),
    "mobilevitv2": (
        _IMAGES,
        {"image_size": _LARGE, "width_multiplier": 0.25, "patch_size": 2, "base_attn_unit_dims": [32, 32, 32]},
    ),
    "poolformer": (
        _IMAGES,
        {
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "mlp_ratio": 2.0,
            "stride": 4,
        },
    ),
    "pvt": (
        _IMAGES,
        {
            "image_size": _LARGE,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
        },
    ),
    "pvt_v2": (
        _IMAGES,
        {
            "image_size": _LARGE,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
        },
    ),
    "regnet": (_IMAGES, {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8}),
    "resnet": (_IMAGES, {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "segformer": (
        _IMAGES,
        {
            "image_size": _LARGE,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
        },
    ),
    "siglip": (
        _IMAGES,
        {
            "vision_config": {
                "image_size": SIDE,
                "patch_size": 8,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            }
        },
    ),
    "swiftformer": (_IMAGES, {"image_size": _LARGE, "embed_dims": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    "swin": (_IMAGES, {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}),
    "swinv2": (_IMAGES, {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}),
    "vit": (_IMAGES, {}),
    "vit_msn": (_IMAGES, {}),
}


NOT_PASSED = {
    "nystromformer": ("fault", "samples influence each other"),
    "phimoe": ("not shown", "draws random numbers in addition to dropout"),
}
"""By family: what verify rightly says of it. The first divides by the largest number of a whole batch."""


def arguments(family: str) -> list[str]:
    """The target of the command and its overrides."""
    own = ["parallel.find_unused_parameters=true"] if family in _SOME_UNUSED else []
    return [f"{Path(__file__).resolve()}:TransformerModel", f"task.family={family}", *OVERRIDES, *own]


def build(family: str) -> Any:
    """A small, new model."""
    import transformers

    kind, own = FAMILIES[family]
    known = inspect.signature(transformers.CONFIG_MAPPING[family]).parameters
    aliases = transformers.CONFIG_MAPPING[family].attribute_map
    small = {key: value for key, value in _SMALL.items() if key in known and aliases.get(key, key) not in own}
    config = transformers.AutoConfig.for_model(family, **small | own)
    config.num_labels = CLASSES
    for name in ("is_decoder",) if kind == _CAUSAL and hasattr(config, "is_decoder") else ():
        setattr(config, name, True)
    if family in ("deit", "levit"):  # the automatic class wants a model with a teacher
        model = getattr(transformers, f"{'DeiT' if family == 'deit' else 'Levit'}ForImageClassification")(config)
    else:
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in _UNUSED):
            parameter.requires_grad_(False)
    return model


class TransformerModel(Task):
    """Each next word of sentences that a rule makes, or the class of a picture, by its colours.

    Args:
        family: a key of `FAMILIES`.
    """

    def __init__(self, family: str = "llama") -> None:
        self.family, self.kind = family, FAMILIES[family][0]

    def model(self) -> Any:
        return build(self.family)

    def train_data(self) -> TensorDataset:
        return self._data(200, seed=0)

    def eval_data(self) -> TensorDataset:
        return self._data(60, seed=1)

    def _data(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        if self.kind == _IMAGES:
            labels = torch.randint(CLASSES, (count,), generator=generator)
            colours = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, -1.0, 1.0], [1.0, 1.0, -1.0]])[labels]
            side = _LARGE if FAMILIES[self.family][1].get("image_size") == _LARGE else SIDE
            noise = torch.randn(count, 3, side, side, generator=generator)
            return TensorDataset(colours[:, :, None, None] + 0.5 * noise, labels)
        first = torch.randint(WORDS - 4, (count, 1), generator=generator)
        words = 4 + (first + 3 * torch.arange(LENGTH + 1)) % (WORDS - 4)
        return TensorDataset(words[:, :-1], words[:, 1:])

    def _logits(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind == _IMAGES:
            logits = model(pixel_values=inputs).logits
        elif self.kind == _PAIRS:
            logits = model(input_ids=inputs, decoder_input_ids=inputs).logits
        else:
            logits = model(input_ids=inputs).logits
        return logits

    def weight(self, batch: Any) -> torch.Tensor:
        return torch.tensor(float(batch[1].numel()))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        logits = self._logits(model, batch[0])
        return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="sum")

    def predict(self, model: Any, batch: Any) -> torch.Tensor:
        return self._logits(model, batch[0]).flatten(1, -2) if self.kind != _IMAGES else self._logits(model, batch[0])
