"""A small, readable language model. It computes the same as transformers' Llama, with the same names of weights.

So `AutoModelForCausalLM` loads what `lockstep export` writes, and a test compares the two.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep_recipes.tasks.lm.attention import attend, rotated, rotations

Seen = list[tuple[Tensor, Tensor]]
"""Keys and values of the tokens so far, for each layer: (samples, heads of keys, tokens, head width)."""


class Output(NamedTuple):
    """What the model returns, under the names of transformers."""

    logits: Tensor
    """(samples, tokens, vocabulary)."""
    past_key_values: Seen | None


class SmallModel(nn.Module):
    """A Llama-style decoder: rotary positions, RMSNorm, SwiGLU, and heads that share keys and values.

    Touvron et al. 2023, arXiv:2302.13971; Ainslie et al. 2023, arXiv:2305.13245, for the shared heads.

    Args:
        config: a `LlamaConfig`.
        dropout: the dropout of embeddings and of the output of each layer.
    """

    takes_groups = True
    """Documents of a batch may be given as `attention.Groups`."""
    _tp_plan: ClassVar[dict[str, str]] = {  # under the name of transformers, too
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self, config: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.apply(self._begin)

    def get_input_embeddings(self) -> nn.Module:
        """The layer that every token passes first, under the name of transformers."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The last layer, under the name of transformers."""
        return self.lm_head

    def _begin(self, module: nn.Module) -> None:
        """New weights as in GPT-2 (Radford et al. 2019, section 2.3): in deep models, the outputs of layers start
        smaller."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, Attention | FeedForward):
            last = module.o_proj if isinstance(module, Attention) else module.down_proj
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            nn.init.normal_(last.weight, std=std)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Seen | None = None,
        use_cache: bool = False,
    ) -> Output:
        """The logits of the token after each token.

        Args:
            input_ids: (samples, tokens).
            position_ids: (samples, tokens), counted from 0 in each document. None: a row is one document.
            attention_mask: (samples, 1, tokens, tokens seen), true if a token sees another; or what
                `attention.mask_for` returns. None: each token sees itself and all earlier tokens.
            past_key_values: keys and values of the tokens before these.
            use_cache: return the keys and values of all tokens.
        """
        seen: Seen | None = [] if use_cache else None
        hidden = self.model(input_ids, position_ids, attention_mask, past_key_values, seen)
        return Output(self.lm_head(hidden), seen)


class Decoder(nn.Module):
    """The final hidden state of each token."""

    def __init__(self, config: Any, dropout: float) -> None:
        super().__init__()
        self.head_width, self.base = config.head_dim, config.rope_parameters["rope_theta"]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, ids: Tensor, positions: Tensor | None, mask: Any, before: Seen | None = None, seen: Seen | None = None
    ) -> Tensor:
        if positions is None:
            begin = before[0][0].shape[2] if before else 0
            positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None]
        hidden: Tensor = self.dropout(self.embed_tokens(ids))
        turns = rotations(positions, self.head_width, self.base, hidden.dtype)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, turns, mask, before[number] if before else None, seen)
        normed: Tensor = self.norm(hidden)
        return normed


class Layer(nn.Module):
    """Attention, then a feed-forward layer, both with residual connections."""

    def __init__(self, config: Any, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Any,
        before: tuple[Tensor, Tensor] | None,
        seen: Seen | None,
    ) -> Tensor:
        hidden = hidden + self.dropout(self.self_attn(self.input_layernorm(hidden), turns, mask, before, seen))
        added: Tensor = hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        return added


class Attention(nn.Module):
    """Each token attends to the tokens that it sees. Groups of queries share keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width, width = config.head_dim, config.hidden_size
        self.config = config
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)

    def forward(
        self,
        hidden: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Any,
        before: tuple[Tensor, Tensor] | None,
        seen: Seen | None,
    ) -> Tensor:
        query, key, value = (self._by_head(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotated(query, turns), rotated(key, turns)
        if before is not None:
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        if seen is not None:
            seen.append((key, value))
        is_causal = mask is None and before is None
        mixed = attend(query, key, value, mask, is_causal)
        summed: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return summed

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return down
