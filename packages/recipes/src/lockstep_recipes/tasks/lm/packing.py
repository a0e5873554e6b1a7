"""The plan that packs documents into rows: a pure function of the lengths, without state or random numbers."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from lockstep_recipes.tasks.arrays import Array


class DocumentPieces(NamedTuple):
    """Pieces of documents that fit into rows. All arrays have one number per piece."""

    begins: Array
    """The first token of each piece, counted over all documents."""
    lengths: Array
    """The number of positions of each piece: each position predicts the next token."""
    split: int
    """Number of documents with several pieces."""


def cut(ends: Array, counts: Array, length: int) -> DocumentPieces:
    """Split documents into pieces of at most `length` positions.

    A document of n tokens has n - 1 positions, and each position predicts the next token. So consecutive pieces share a
    token, which the first predicts and the second sees, and each token is predicted once. Positions after the last
    learned token are left out, as are pieces in which nothing is learned.

    Args:
        ends: the end of each document: (documents).
        counts: true if a token is learned: (tokens).
    """
    ends = np.asarray(ends, dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    per_document = np.maximum(-(-(ends - starts - 1) // length), 0)
    begins = np.repeat(starts, per_document)
    first = np.repeat(np.cumsum(per_document) - per_document, per_document)
    begins = begins + (np.arange(len(begins)) - first) * length
    stops = np.minimum(begins + length, np.repeat(ends, per_document) - 1)
    learned = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    last = np.searchsorted(learned, learned[stops + 1])  # after the last token that is learned in the piece
    stops = np.minimum(stops, last - 1)
    kept = learned[stops + 1] > learned[begins + 1]
    return DocumentPieces(begins[kept], (stops - begins)[kept], int((per_document > 1).sum()))


def pack(lengths: Array, length: int) -> tuple[Array, Array]:
    """Rows of pieces, each of at most `length` positions.

    Pieces are placed from longest to shortest, each in the row with the least sufficient space (best-fit decreasing;
    used for language models by Ding et al. 2024, arXiv:2404.10830). Pieces of equal length keep their order. The time
    is proportional to the number of pieces times the logarithm of `length`.

    Args:
        lengths: the number of positions of each piece, from 1 to `length`.

    Returns:
        the pieces of all rows, one row after another, and the end of each row.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by remaining space
    rooms: list[int] = []  # remaining spaces that occur, in ascending order
    for piece in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        size = int(lengths[piece])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        rows[row].append(piece)
        left = room - size
        if left:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(row)
    pieces = np.array([piece for row in rows for piece in row], dtype=np.int64)
    return pieces, np.cumsum([len(row) for row in rows], dtype=np.int64)
