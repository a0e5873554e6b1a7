"""What `lockstep look` gets of the documents of a language model."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import Extent, of_error
from lockstep_recipes.tasks.lm.documents import Document
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView, chosen


def view_of_documents(reads: dict[str, Callable[[], list[Document]]], extent: Extent) -> TextView:
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
        splits.append(TextSplit(name, texts, lambda row, kept=kept: kept[row].where))  # type: ignore[misc]
    return TextView(splits, refused=refused)
