import random
from collections import Counter
from itertools import pairwise

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from lockstep_recipes.tasks.text import word_piece

SPECIAL = ["[PAD]", "[UNK]"]
PARTS = {"normalizer": normalizers.BertNormalizer(lowercase=True), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}


def words_of(texts):
    return [
        word
        for text in texts
        for word, _ in PARTS["pre_tokenizer"].pre_tokenize_str(PARTS["normalizer"].normalize_str(text))
    ]


def plainly(texts, size):
    """The vocabulary by the definition: join the most frequent pair, again and again."""
    counts = Counter(words_of(texts))
    cut = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in counts}
    letters = sorted({letter for word in counts for letter in word})
    inside = sorted({letter for parts in cut.values() for letter in parts[1:]})
    tokens = [*letters, *inside]
    while len(SPECIAL) + len(tokens) < size:
        pairs = Counter()
        for word, parts in cut.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        joined = best[0] + best[1].removeprefix("##")
        tokens += [] if joined in tokens else [joined]
        for word, parts in cut.items():
            place, new = 0, []
            while place < len(parts):
                is_pair = tuple(parts[place : place + 2]) == best
                new.append(joined if is_pair else parts[place])
                place += 1 + is_pair
            cut[word] = new
    return [*SPECIAL, *tokens]


def texts(seed):
    draw = random.Random(seed)
    syllables = ["ba", "Né", "ko", "##", "été", "好", "\U00020000", "\U0001f600", "1", "-", "zz"]
    return [" ".join("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20)) for _ in range(30)]


def test_the_vocabulary_is_that_of_the_definition():
    for seed, size in ((0, 60), (1, 90), (2, 5), (3, 100_000)):
        found = word_piece.train(texts(seed), size=size, special=SPECIAL, **PARTS)
        assert found == plainly(texts(seed), size), (seed, size)
        assert found == word_piece.train(texts(seed)[::-1], size=size, special=SPECIAL, **PARTS), "the order counts"
    assert word_piece.train([], size=100, special=SPECIAL, **PARTS) == SPECIAL
    assert word_piece.train(["", " \t"], size=100, special=SPECIAL, **PARTS) == SPECIAL
    word = ["ab " * 25_000]  # repeated more often than fits into one text
    assert word_piece.train(word, size=100, special=SPECIAL, **PARTS) == [*SPECIAL, "a", "b", "##b", "ab"]


def test_the_whole_vocabulary_is_that_of_tokenizers():
    """Where all pairs are joined, ties do not count: theirs differs only in the order."""
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer, theirs.pre_tokenizer = PARTS["normalizer"], PARTS["pre_tokenizer"]
    letters = ["ab abc abcd xy xyz", "ab ab abc xy"]
    theirs.train_from_iterator(
        letters, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=SPECIAL, show_progress=False)
    )
    assert sorted(word_piece.train(letters, size=1000, special=SPECIAL, **PARTS)) == sorted(theirs.get_vocab())
