"""Tokenizers, and documents as tokens: computed once per machine, in files that all ranks and loader workers map."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.lm.documents import Corpus, Document, TextSegment, divided
from lockstep_recipes.tasks.lm.options import LmOptions
from lockstep_recipes.tasks.readers.cache import cached, digest_of
from lockstep_recipes.tasks.text import hugging_face
from lockstep_recipes.tasks.text.data import OfFolder, mapped, unknown_tokens

END = "<|endoftext|>"
"""The token before and after each document, for a tokenizer that is trained here."""
_UNKNOWN = "<|unknown|>"
_FORMAT = 6  # of the cached files
_BLOCK = 2**20  # characters to tokenise at a time


def train_tokenizer(options: LmOptions, read: Callable[[], list[Document]], digest: str) -> Any:
    """A tokenizer of the training texts, trained once per machine.

    `bpe` merges the most frequent pairs of bytes within words (Radford et al. 2019, section 2.2), so it can encode
    every text. `characters` has the characters of the training texts.

    Args:
        read: the training documents.
        digest: the digest of the training documents.
    """
    is_bpe = options.tokenizer != "characters"
    key = digest_of(_FORMAT, digest, is_bpe, options.vocab_size, hugging_face.version_of("tokenizers"))

    def make(folder: Path) -> None:
        from tokenizers import processors
        from transformers import PreTrainedTokenizerFast

        texts = (part.text for document in read() for part in document.parts)
        made = _byte_pairs(texts, options.vocab_size) if is_bpe else _characters(texts)
        ends = [(END, made.token_to_id(END))]  # users of an export get the token that starts a document
        made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=ends)
        special = {"bos_token": END, "eos_token": END, "pad_token": END}
        unknown = {} if is_bpe else {"unk_token": _UNKNOWN}
        arguments: Any = {"tokenizer_object": made, "clean_up_tokenization_spaces": False, **special, **unknown}
        kind: Any = PreTrainedTokenizerFast
        kind(**arguments).save_pretrained(folder)

    return hugging_face.load_tokenizer(cached("tokenizer", key, make))


def _byte_pairs(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _characters(texts: Iterable[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted({letter for text in texts for letter in set(text)})
    vocabulary = {token: number for number, token in enumerate([END, _UNKNOWN, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, _UNKNOWN])
    return tokenizer


def renderer(tokenizer: Any) -> Callable[..., str] | None:
    """The chat template of a tokenizer as a function. None: it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return None

    def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(tokenizer.apply_chat_template(messages, **options))

    return render


def start_and_end(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token before each document, so that its first token can be predicted, and the token after it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return (end if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]), end


class DocumentTokens(OfFolder):
    """The tokens of documents, one document after another, stored in a folder of the cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        about = json.loads((folder / "about.json").read_text())
        self.places: list[str] = about["places"]
        """The place of each document, for messages."""
        self.kind: str = about["kind"]
        """`plain` texts, `answers` to prompts, or `chats`."""
        self.unknown: int = about["unknown"]
        """Number of tokens for characters that the tokenizer does not know."""
        self.words: int = about["words"]
        """Number of tokens without special tokens."""
        self.largest: int = about["largest"]
        """The largest token number."""
        self.bytes: int = about["bytes"]
        """Size of the texts in UTF-8."""
        self.digest: str = about["digest"]
        """The digest of all tokens, including which of them are learned."""
        self.ids = mapped(folder / "ids.npy")
        """int32 (tokens)."""
        self.sizes = mapped(folder / "sizes.npy")
        """The bytes of text of each token: uint32 (tokens)."""
        self.counts = mapped(folder / "counts.npy")
        """True if the token is learned: (tokens)."""
        self.ends = mapped(folder / "ends.npy")
        """The end of each document: int64 (documents)."""


def tokenise(corpus: Corpus, tokenizer: Any, options: LmOptions, *, part: str = "all") -> DocumentTokens:
    """The tokens of a corpus.

    Args:
        part: `all` documents, those for `training`, or those that are `held` back.

    Raises:
        DataError: the corpus cannot be read.
    """
    settings = [*corpus.settings(), part, *start_and_end(tokenizer), getattr(tokenizer, "chat_template", None)]
    if part != "all":
        settings += [options.eval_fraction, options.split_seed]
    key = digest_of(_FORMAT, hugging_face.digest_of_tokenizer(tokenizer), *settings, files=corpus.files())

    def make(folder: Path) -> None:
        _store(read_part(corpus, tokenizer, options, part), tokenizer, folder)

    return DocumentTokens(cached("lm-tokens", key, make))


def read_part(corpus: Corpus, tokenizer: Any, options: LmOptions, part: str) -> list[Document]:
    """All documents of a corpus, those for training, or those held back."""
    documents = corpus.read(renderer(tokenizer))
    if part == "all":
        return documents
    training, held = divided(documents, options.eval_fraction, options.split_seed)
    if not (held and training):
        remedy = "give data.eval, or task.eval_fraction=0 and train.eval_every_epochs=0"
        raise DataError("too little text to hold back some for evaluation", where=corpus.name, remedy=remedy)
    return training if part == "training" else held


def _store(documents: list[Document], tokenizer: Any, folder: Path) -> None:
    start, end = start_and_end(tokenizer)
    columns: list[tuple[Array, Array, Array]] = []
    lengths = []
    is_whole = _writes_before(tokenizer)
    for document in documents:
        found = [] if document.is_chat else [_bare(start, False)]
        for part in (_joined(document),) if document.is_chat and is_whole else document.parts:
            found += list(_encoded(part, tokenizer))
        found += [] if document.is_chat else [_bare(end, True)]
        columns += found
        lengths.append(sum(len(tokens) for tokens, _, _ in found))
    ids, sizes, counts = (np.concatenate(column) for column in zip(*columns, strict=True))
    saved = {"ids": ids, "sizes": sizes, "counts": counts, "ends": np.cumsum(lengths, dtype=np.int64)}
    for name, array in saved.items():
        np.save(folder / f"{name}.npy", array)
    unknown, words = unknown_tokens(ids, tokenizer)
    about: dict[str, Any] = {"places": [document.where for document in documents], "unknown": unknown, "words": words}
    about["kind"] = "chats" if documents[0].is_chat else "plain" if documents[0].is_plain else "answers"
    about["largest"] = int(ids.max(initial=0))
    about["digest"] = digest_of(files=tuple(folder / f"{name}.npy" for name in saved))
    about["bytes"] = sum(len(part.text.encode()) for document in documents for part in document.parts)
    (folder / "about.json").write_text(json.dumps(about))


def _bare(tokens: list[int], counts: bool) -> tuple[Array, Array, Array]:
    """Tokens without text."""
    return np.array(tokens, np.int32), np.zeros(len(tokens), np.uint32), np.full(len(tokens), counts)


def _writes_before(tokenizer: Any) -> bool:
    """True if a text has different tokens after a line break: many tokenizers put a space before each text."""
    behind, alone = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a\na", "a"))
    return bool(behind[-len(alone) :] != alone)


def _joined(document: Document) -> _Joined:
    """The segments of a chat as a single text: with such a tokenizer, separate segments would have additional
    spaces."""
    said: list[tuple[int, int]] = []
    at = 0
    for part in document.parts:
        inside = ((0, len(part.text)),) if part.said is None else part.said
        said += [(at + begin, at + end) for begin, end in inside if part.counts]
        at += len(part.text)
    is_learned = np.concatenate([np.full(len(part.text), part.counts) for part in document.parts])
    return _Joined("".join(part.text for part in document.parts), is_learned, tuple(said))


class _Joined(NamedTuple):
    """Like `TextSegment`, with whether each character is learned: (characters)."""

    text: str
    counts: Array
    said: tuple[tuple[int, int], ...] | None


def _encoded(part: TextSegment | _Joined, tokenizer: Any) -> Iterator[tuple[Array, Array, Array]]:
    """The tokens of a text, the bytes of text of each token, and whether any of its characters is learned."""
    counts = np.broadcast_to(part.counts, (len(part.text),))
    start = 0
    for block in _blocks(part.text):
        begin, start = start, start + len(block)
        bytes_until = _bytes_until(block, part.said, begin)
        options = {"return_attention_mask": False, "verbose": False}
        encoded = tokenizer(block, add_special_tokens=False, return_offsets_mapping=True, **options)
        if not encoded["input_ids"]:
            continue
        places = np.array(encoded["offset_mapping"], dtype=np.int64)
        until = np.maximum.accumulate(bytes_until[places[:, 1]])
        until[-1] = bytes_until[-1]
        letters = begin + (places - [0, 1]).clip(0, len(block) - 1)  # the first and the last of each token
        sizes = np.diff(until, prepend=0).astype(np.uint32)
        yield np.array(encoded["input_ids"], dtype=np.int32), sizes, np.any(counts[letters], axis=1)


def _blocks(text: str) -> Iterator[str]:
    """A text in blocks that end after a line break, if there is one, because tokenising takes memory."""
    at = 0
    while at < len(text):
        stop = min(at + _BLOCK, len(text))
        stop = (text.rfind("\n", at, stop) + 1 or stop) if stop < len(text) else stop
        yield text[at:stop]
        at = stop


def _bytes_until(text: str, said: tuple[tuple[int, int], ...] | None, at: int) -> Array:
    """The number of UTF-8 bytes before each character: (characters + 1).

    Args:
        said: as in `TextSegment`, for a block `text` that starts at the character `at`. All other characters count as
            0 bytes.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    sizes = 1 + (letters > 0x7F).astype(np.int64) + (letters > 0x7FF) + (letters > 0xFFFF)
    if said is not None:
        is_said = np.zeros(len(sizes), dtype=bool)
        for begin, end in said:
            is_said[max(begin - at, 0) : max(end - at, 0)] = True
        sizes *= is_said
    return np.concatenate([[0], np.cumsum(sizes)])
