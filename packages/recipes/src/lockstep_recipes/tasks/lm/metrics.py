"""Perplexity, bits per byte and accuracy of the next token, from sums over all tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenScores(Metric):
    """Sums over tokens, which are divided at the end, so there is no mean of means.

    `perplexity` is exp(nats / tokens). `bits_per_byte` is nats / ln 2 / bytes of text, which is comparable across
    tokenizers. `accuracy` is the fraction of tokens that were the most probable. With questions, `exact_match` is the
    fraction that was answered with the correct number.
    """

    higher_is_better = None  # perplexity should be low, accuracy high
    full_state_update = False
    nats: Tensor
    tokens: Tensor
    right: Tensor
    bytes: Tensor
    asked: Tensor
    matched: Tensor

    def __init__(self, has_questions: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.has_questions = has_questions
        self.counts = ["tokens", "right", "bytes", *["asked", "matched"] * has_questions]
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("tokens", "right", "bytes", "asked", "matched"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: dict[str, Tensor]) -> None:
        """Add the sums of a batch, as `LanguageModel.predict` returns them."""
        self.nats += output["nats"].double().sum()
        for name in self.counts:
            setattr(self, name, getattr(self, name) + output[name].sum())

    def compute(self) -> dict[str, Tensor]:
        per_token = self.nats / self.tokens
        bits = self.nats / math.log(2) / self.bytes
        share = self.right.double() / self.tokens
        found = {"perplexity": per_token.exp(), "bits_per_byte": bits, "accuracy": share}
        return found | ({"exact_match": self.matched.double() / self.asked} if self.has_questions else {})
