"""What `lockstep look` gets of the documents of a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from lockstep.core.errors import DataError, LockstepError
from lockstep_recipes.look.finding import DataFinding, Extent, of_error
from lockstep_recipes.tasks.lm.documents import Corpus, Document
from lockstep_recipes.tasks.readers.encodings import guessed
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView, chosen


def view_of_documents(
    reads: dict[str, Callable[[], list[Document]]], extent: Extent, corpora: Sequence[Corpus] = ()
) -> TextView:
    """The documents of each split for the finders. What the task refuses is a finding."""
    splits, refused = [], []
    for name, read in reads.items():
        try:
            documents = read()
        except DataError as error:
            refused.append(of_error(error))
            continue
        kept = [documents[row] for row in chosen(len(documents), extent)]
        texts = ["\n".join(part.text for part in document.parts) for document in kept]
        columns = [[document.parts[place].text for document in kept if document.parts] for place in (0, -1)]
        places = [document.where for document in kept]
        splits.append(TextSplit(name, texts, places.__getitem__, columns=columns))
    return TextView(splits, refused=[*refused, *_guessed(corpora, extent)], is_short=extent.is_short)


def _guessed(corpora: Sequence[Corpus], extent: Extent) -> Iterator[DataFinding]:
    """Text files in UTF-16 or UTF-32 without a byte order mark: they are read, but other programs read NULs."""
    for corpus in corpora:
        with contextlib.suppress(LockstepError):
            files = corpus.files() if corpus.source is None else ()
            for path in (files[row] for row in chosen(len(files), extent)):
                if encoding := guessed(path):
                    what = f"{encoding.upper()} without a byte order mark; it is read so, and not as UTF-8"
                    yield DataFinding("warning", "wrong-encoding", str(path), what, "export the file again as UTF-8")
