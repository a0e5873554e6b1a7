"""The weights with which a new bag of embeddings begins: naive Bayes, by counting the training texts.

A linear model that has seen thousands of texts for a few epochs is not yet better than counting (naive Bayes with
weights of tokens by their rarity), so training begins there (Wang and Manning 2012, "Baselines and bigrams").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from lockstep.tasks.arrays import Array
from lockstep.tasks.text.data import TextData
from lockstep.tasks.text.embedding_bag import EmbeddingBagForSequenceClassification

_SMOOTHING = 0.3  # of counts, in texts
_FEW = 300.0  # texts of a class of which counts are trusted by half; measured in benchmarks/RESULTS.md, as is the next
_CONFIDENCE = 3.0  # with full trust, a logit is so many times the mean log-odds of a text's tokens
_BLOCK = 2**16  # texts that are counted at a time


def begin_with_counts(model: nn.Module, data: TextData, special: Sequence[int]) -> None:
    """Add the weights of naive Bayes to those of a new bag of embeddings. On the meta device, do nothing.

    The importance of a token is its inverse document frequency. The embeddings are the log-odds of the classes, turned
    at random into the space of the embeddings, and the classifier turns them back. The fewer texts a class has, the
    less is added: counts of a few texts mislead, and a training that begins with them ends worse.

    Args:
        data: the training texts.
        special: numbers of the tokens that stand for no text. They get the importance 0.
    """
    assert isinstance(model, EmbeddingBagForSequenceClassification)
    weight, back = model.embeddings.weight, model.classifier.weight
    if weight.is_meta:
        return
    by_class, texts_of_class, by_token = _counts(data, len(weight), len(back))
    texts = len(data)
    importance = np.log((1 + texts) / (1 + by_token)) + 1
    odds = _log_share(by_class, texts_of_class)
    if data.labels.ndim > 1:  # each class is a question of its own
        odds -= _log_share(by_token[:, None] - by_class, texts - texts_of_class)
    else:
        odds -= odds.mean(axis=1, keepdims=True)
    odds[by_token == 0] = 0
    importance[list(special)] = odds[list(special)] = 0
    evidence = float(texts_of_class.mean())
    trust = evidence / (evidence + _FEW)
    with torch.no_grad():
        turn = nn.init.orthogonal_(torch.empty_like(back))
        weight += trust * torch.from_numpy(odds).to(weight) @ turn
        back += trust * _CONFIDENCE * turn
        model.importance.copy_(torch.from_numpy(importance))


def _log_share(counts: Array, texts: Array) -> Array:
    """The logarithm of the smoothed share of texts that have a token."""
    shares: Array = np.log((counts + _SMOOTHING) / (texts + 2 * _SMOOTHING))
    return shares


def _counts(data: TextData, tokens: int, classes: int) -> tuple[Array, Array, Array]:
    """The texts that have a token, by token and class; the texts of each class; the texts that have a token."""
    rows = np.arange(len(data.texts)) if data.rows is None else data.rows
    by_class, by_token = np.zeros(tokens * classes, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    texts_of_class = np.zeros(classes, dtype=np.int64)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        lengths, ends = data.tokens.lengths[block], data.tokens.ends[block]
        text = np.repeat(np.arange(len(block)), lengths)
        place = np.arange(len(text)) + np.repeat(ends - np.cumsum(lengths), lengths)
        text, token = np.divmod(np.unique(text * tokens + data.tokens.ids[place]), tokens)
        by_token += np.bincount(token, minlength=tokens)
        labels = data.labels[block]
        for label in range(classes) if labels.ndim > 1 else ():
            has = labels[:, label] > 0
            by_class[label::classes] += np.bincount(token[has[text]], minlength=tokens)
            texts_of_class[label] += has.sum()
        if labels.ndim == 1:
            by_class += np.bincount(token * classes + labels[text], minlength=tokens * classes)
            texts_of_class += np.bincount(labels, minlength=classes)
    return by_class.reshape(tokens, classes), texts_of_class, by_token
