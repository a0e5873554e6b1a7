"""The plan that fills rows with documents: a pure function of the lengths, with no state and no random numbers."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from lockstep_recipes.tasks.arrays import Array


class Pieces(NamedTuple):
    """Stretches of documents that fit into rows. All arrays have a number for each piece."""

    begins: Array
    """The first token of each piece, counted over all documents."""
    lengths: Array
    """The places of each piece: each predicts the token behind it."""
    split: int
    """Number of documents that have several pieces."""


def cut(ends: Array, counts: Array, length: int) -> Pieces:
    """Cut documents into pieces of at most `length` places.

    A document of n tokens has n - 1 places, of which each predicts the next token. So consecutive pieces share a token,
    which is predicted by the one and seen by the other, and each token is predicted once. Places behind the last token
    that is learned are left out, and pieces in which nothing is learned.

    Args:
        ends: where each document ends: (documents).
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
    last = np.searchsorted(learned, learned[stops + 1])  # behind the last token that is learned in the piece
    stops = np.minimum(stops, last - 1)
    kept = learned[stops + 1] > learned[begins + 1]
    return Pieces(begins[kept], (stops - begins)[kept], int((per_document > 1).sum()))


def pack(lengths: Array, length: int) -> tuple[Array, Array]:
    """Rows of pieces, each of at most `length` places.

    The longest piece comes first, and goes into the row with the least room that suffices (best-fit decreasing; used
    for language models by Ding et al. 2024, arXiv:2404.10830). Pieces of equal length keep their order. The time grows
    with the number of pieces times the logarithm of `length`.

    Args:
        lengths: places of each piece, from 1 to `length`.

    Returns:
        the pieces of all rows, one row behind the other, and where each row ends.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the room that is left in them
    rooms: list[int] = []  # for which there are rows, in ascending order
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
