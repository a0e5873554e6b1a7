"""The vocabulary of a new WordPiece tokenizer, the same in every process.

`tokenizers.trainers.WordPieceTrainer` numbers the characters inside words (`##a`) in the order of a hash table, which
each process seeds differently, and merges equally frequent pairs in the order of these numbers. So each process trains
a different vocabulary. `BpeTrainer` does the same work, and its result depends only on the counts if its alphabet is
given. Here each character becomes a symbol of that alphabet, with a different symbol inside words, and the trained
tokens are converted back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_INSIDE = "##"  # before a token that does not start a word
_FIRST_SYMBOL = 0x20000  # from here, no character is a space, half of a surrogate pair, or has an upper or lower case
_MOST = 10_000  # repetitions of a word in a text


def train(texts: Iterable[str], *, normalizer: Any, pre_tokenizer: Any, size: int, special: Sequence[str]) -> list[str]:
    """The tokens of a vocabulary, in order: special tokens, characters, characters inside words, and pairs in the order
    in which they were merged (most frequent first; among equally frequent ones, the pair whose tokens have the lower
    numbers).

    Args:
        normalizer, pre_tokenizer: those of `tokenizers`, which split a text into words.
        size: the maximum number of tokens. All characters are included, however many there are.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
    letters = sorted(set().union(*counts))
    inside = sorted(set().union(*(word[1:] for word in counts)))
    alphabet = [*letters, *(_INSIDE + letter for letter in inside)]
    symbols = {token: chr(_FIRST_SYMBOL + number) for number, token in enumerate(alphabet)}
    first = str.maketrans({letter: symbols[letter] for letter in letters})
    later = str.maketrans({letter: symbols[_INSIDE + letter] for letter in inside})

    def repeated() -> Iterator[str]:
        for word, count in sorted(counts.items()):
            spelled = word[:1].translate(first) + word[1:].translate(later)
            for begin in range(0, count, _MOST):
                yield " ".join([spelled] * min(_MOST, count - begin))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=max(size - len(special), 0), initial_alphabet=list(symbols.values()), show_progress=False
    )
    tokenizer.train_from_iterator(repeated(), trainer)
    numbers = tokenizer.get_vocab()
    spelled_as = {symbol: token for token, symbol in symbols.items()}
    tokens = []
    for joined in sorted(numbers, key=numbers.__getitem__):
        parts = [spelled_as[symbol] for symbol in joined]
        tokens.append(parts[0] + "".join(part.removeprefix(_INSIDE) for part in parts[1:]))
    return [*special, *(token for token in tokens if token not in special)]
