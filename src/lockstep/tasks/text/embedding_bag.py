"""A bag of embeddings as a Hugging Face model: what learns most from few texts where nothing is pretrained.

The class scores of a text are a linear function of the mean of its tokens' embeddings: fastText without n-grams (Joulin
et al. 2017, arXiv:1607.01759). An exported model has this file beside it, by which `trust_remote_code=True` loads it
without Lockstep; so it imports nothing of the package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput


class EmbeddingBagConfig(PreTrainedConfig):
    """vocab_size: of the tokenizer. hidden_size: of an embedding. initializer_range: standard deviation of embeddings."""

    model_type = "embedding_bag"
    vocab_size: int = 8000
    hidden_size: int = 100
    initializer_range: float = 0.01


class EmbeddingBagForSequenceClassification(PreTrainedModel):
    """Token ids (texts, tokens) to logits (texts, classes). Neither word order nor the text of a pair that a token is in
    counts."""

    config_class = EmbeddingBagConfig
    base_model_prefix = "embeddings"

    def __init__(self, config: EmbeddingBagConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        labels: Any = config.num_labels
        self.classifier = nn.Linear(config.hidden_size, labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        vectors = self.embeddings(input_ids)
        if attention_mask is None:
            return SequenceClassifierOutput(logits=self.classifier(vectors.mean(dim=1)))
        mask = attention_mask.unsqueeze(-1).to(vectors)
        mean = (vectors * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return SequenceClassifierOutput(logits=self.classifier(mean))


# In a config.json, where transformers looks for a class that it lacks: `register` has this file copied there.
AUTO_MAP = {
    "AutoConfig": "embedding_bag.EmbeddingBagConfig",
    "AutoModelForSequenceClassification": "embedding_bag.EmbeddingBagForSequenceClassification",
}


def register() -> None:
    """Let transformers' Auto classes know it, as they know their own."""
    AutoConfig.register(EmbeddingBagConfig.model_type, EmbeddingBagConfig, exist_ok=True)
    auto = AutoModelForSequenceClassification
    auto.register(EmbeddingBagConfig, EmbeddingBagForSequenceClassification, exist_ok=True)
    EmbeddingBagConfig.register_for_auto_class()
