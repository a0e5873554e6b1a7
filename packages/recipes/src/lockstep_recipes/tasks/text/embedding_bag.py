"""A bag of embeddings as a Hugging Face model. Of all models without pretrained weights, it learns most from few texts.

The class scores of a text are a linear function of a weighted mean of the embeddings of its tokens and of the character
n-grams inside them: fastText (Joulin et al. 2017, arXiv:1607.01759; Bojanowski et al. 2017, arXiv:1607.04606), with
fixed weights. This file is copied into exported models, so that `trust_remote_code=True` loads them without Lockstep.
Therefore it does not import anything from the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class EmbeddingBagConfig(PreTrainedConfig):
    """The config of an `EmbeddingBagForSequenceClassification`."""

    model_type = "embedding_bag"
    vocab_size: int = 8000
    """Number of tokens of the tokenizer."""
    hidden_size: int = 100
    """Size of an embedding."""
    ngram_buckets: int = 0
    """Number of embeddings that the n-grams of the tokens share. 0: no n-grams."""
    ngrams_per_token: int = 40
    """Maximum number of n-grams of a token. Enough for all n-grams of a token of 14 characters."""
    initializer_range: float = 0.01
    """Standard deviation of new embeddings."""


class EmbeddingBagForSequenceClassification(PreTrainedModel):
    """Token ids (texts, tokens) to logits (texts, classes).

    The order of words is ignored, as is which text of a pair a word belongs to.
    """

    config_class = EmbeddingBagConfig
    base_model_prefix = "embeddings"

    def __init__(self, config: EmbeddingBagConfig) -> None:
        super().__init__(config)
        rows = config.vocab_size + config.ngram_buckets
        self.embeddings = nn.Embedding(rows, config.hidden_size)
        labels: Any = config.num_labels
        self.classifier = nn.Linear(config.hidden_size, labels)
        self.importance: Tensor
        self.register_buffer("importance", torch.ones(rows))
        self.ngrams: Tensor | None
        # By token: the embedding rows of its n-grams, then that of the padding token, whose importance is 0.
        shape = config.vocab_size, config.ngrams_per_token
        self.register_buffer("ngrams", torch.zeros(shape, dtype=torch.int32) if config.ngram_buckets else None)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
            nn.init.zeros_(module.bias)
        elif module is self:  # models saved before tokens had weights use a plain mean
            nn.init.ones_(self.importance)
            if self.ngrams is not None:
                nn.init.zeros_(self.ngrams)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        rows = input_ids.unsqueeze(-1)  # (texts, tokens, embeddings of a token)
        if self.ngrams is not None:
            rows = torch.cat([rows, self.ngrams[input_ids]], dim=-1)
        weights = self.importance[rows]
        if attention_mask is not None:
            weights = weights * attention_mask.to(weights).unsqueeze(-1)
        total = weights.sum(dim=(1, 2), keepdim=True)
        shares = weights / torch.where(total > 0, total, 1)
        mean = (shares.flatten(1).unsqueeze(1) @ self.embeddings(rows.flatten(1))).squeeze(1)
        return SequenceClassifierOutput(logits=self.classifier(mean))


# These names go into config.json, where transformers looks up classes that it lacks. `register` makes it copy this
# file.
AUTO_MAP = {
    "AutoConfig": "embedding_bag.EmbeddingBagConfig",
    "AutoModelForSequenceClassification": "embedding_bag.EmbeddingBagForSequenceClassification",
}


def register() -> None:
    """Register the model with the Auto classes of transformers."""
    AutoConfig.register(EmbeddingBagConfig.model_type, EmbeddingBagConfig, exist_ok=True)
    auto = AutoModelForSequenceClassification
    auto.register(EmbeddingBagConfig, EmbeddingBagForSequenceClassification, exist_ok=True)
    EmbeddingBagConfig.register_for_auto_class()
