"""The n-grams of a new bag of embeddings, and its initial weights: naive Bayes, from counts of the training texts.

A linear model that has seen thousands of texts for a few epochs is not yet better than counting (naive Bayes with
tokens weighted by rarity), so training starts there (Wang and Manning 2012, "Baselines and bigrams"). Rare words share
character n-grams with more frequent words.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.text.data import TextData
from lockstep_recipes.tasks.text.embedding_bag import EmbeddingBagConfig, EmbeddingBagForSequenceClassification

_SMOOTHING = 0.3  # added to counts, in texts
# With this many texts, the counts of a class get half weight; measured, like the next, in benchmarks/HISTORY.md.
_FEW = 300.0
_CONFIDENCE = 3.0  # at full weight, a logit is this multiple of the mean log-odds of a text's tokens
_BLOCK = 2**12  # texts to count at a time
_LETTERS = range(3, 6)  # characters of an n-gram, with the marks of token boundaries
_NGRAM_IMPORTANCE = 0.5  # of an n-gram, relative to an equally frequent token


def ngrams_of(token: str) -> list[str]:
    """The distinct n-grams of 3 to 5 characters of a WordPiece token, except the token itself, from short to long. `<`
    marks the start of a word, so tokens inside words do not have it, and `>` the end of the token."""
    letters = (token.removeprefix("##") if token.startswith("##") else "<" + token) + ">"
    sizes = [size for size in _LETTERS if size < len(letters)]
    found = [letters[at : at + size] for size in sizes for at in range(len(letters) - size + 1)]
    return list(dict.fromkeys(found))


def ngram_rows(config: EmbeddingBagConfig, tokens: Sequence[str], special: Sequence[int]) -> Array:
    """The rows of the embeddings of each token's n-grams: those of the buckets, which follow those of the tokens.

    The bucket of an n-gram is the CRC-32 of its UTF-8 bytes, modulo the number of buckets. A token with fewer n-grams
    than `ngrams_per_token` is filled up with the row of the padding token; of a token with more, the first are used.

    Args:
        special: numbers of the special tokens. They do not have n-grams.

    Returns:
        Rows: (`vocab_size`, `ngrams_per_token`).
    """
    rows = np.full((config.vocab_size, config.ngrams_per_token), config.pad_token_id, dtype=np.int32)
    for number in sorted(set(range(len(tokens))) - set(special)):
        found = [zlib.crc32(ngram.encode()) for ngram in ngrams_of(tokens[number])[: config.ngrams_per_token]]
        rows[number, : len(found)] = [config.vocab_size + digest % config.ngram_buckets for digest in found]
    return rows


def begin_with_counts(model: nn.Module, data: TextData, tokens: Sequence[str], special: Sequence[int]) -> None:
    """Add the weights of naive Bayes to those of a new bag of embeddings. On the meta device, do nothing.

    The importance of a token is its inverse document frequency, and that of an n-gram half of it. The embeddings are
    the log-odds of the classes, randomly rotated into the embedding space, and the classifier rotates them back. The
    fewer texts a class has, the less is added: counts from a few texts are misleading, and training that starts from
    them gives worse results.

    Args:
        data: the training texts.
        tokens: the vocabulary, in order.
        special: numbers of the special tokens. They get the importance 0.
    """
    assert isinstance(model, EmbeddingBagForSequenceClassification)
    weight, back = model.embeddings.weight, model.classifier.weight
    if weight.is_meta:
        return
    ngrams, config = None, model.config
    assert isinstance(config, EmbeddingBagConfig)
    if model.ngrams is not None:
        ngrams = ngram_rows(config, tokens, special)
        model.ngrams.copy_(torch.from_numpy(ngrams))
    by_class, texts_of_class, by_token = _counts(data, len(weight), len(back), ngrams)
    texts = len(data)
    importance = np.log((1 + texts) / (1 + by_token)) + 1
    importance[config.vocab_size :] *= _NGRAM_IMPORTANCE
    odds = _log_share(by_class, texts_of_class)
    if data.labels.ndim > 1:  # each class is a separate question
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
    """The logarithm of the smoothed fraction of texts that contain a token."""
    shares: Array = np.log((counts + _SMOOTHING) / (texts + 2 * _SMOOTHING))
    return shares


def _counts(data: TextData, tokens: int, classes: int, ngrams: Array | None) -> tuple[Array, Array, Array]:
    """The number of texts that contain a token, by token and class; of texts in each class; of texts that contain a
    token.

    Buckets of n-grams are counted as tokens.
    """
    rows = np.arange(len(data.texts)) if data.rows is None else data.rows
    by_class, by_token = np.zeros(tokens * classes, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    texts_of_class = np.zeros(classes, dtype=np.int64)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        lengths, ends = data.tokens.lengths[block], data.tokens.ends[block]
        text = np.repeat(np.arange(len(block)), lengths)
        place = np.arange(len(text)) + np.repeat(ends - np.cumsum(lengths), lengths)
        text, token = np.divmod(np.unique(text * tokens + data.tokens.ids[place]), tokens)
        if ngrams is not None:
            inside = ngrams[token]
            filled = inside >= len(ngrams)
            found = np.unique(np.repeat(text, filled.sum(axis=1)) * tokens + inside[filled])
            more_text, more = np.divmod(found, tokens)
            text, token = np.concatenate([text, more_text]), np.concatenate([token, more])
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
