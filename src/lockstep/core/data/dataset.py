"""The members that a data set may have besides its length and its samples. They are read here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from lockstep.core.data.order import Order

Member = Literal[
    "lengths",
    "order",
    "sample_weights",
    "sample_labels",
    "labels",
    "targets",
    "content_digests",
    "check_first",
    "where",
    "notes",
    "__getitems__",
    "reads_forward",
]
MEMBERS: tuple[str, ...] = get_args(Member)
LABELS: tuple[Member, ...] = ("sample_labels", "labels", "targets")
"""The names of the labels of the samples. The first that a data set has counts."""


class OptionalMembers(Protocol):
    """Every member that Lockstep looks for in a data set. A data set may have any of them, and needs none.

    Training and evaluation data, and the inputs of a prediction, may have them. Values are read when a command begins,
    before the first step; methods are called later. `lockstep --explain data_sets` has them for users.
    """

    lengths: Any
    """(samples,): the length of each sample in any unit, such as tokens, integers or floats. Samples of similar length
    share a micro-batch, and ranks get equal work. Lengths need not be exact."""
    order: Order
    """The samples that an epoch of the training draws, by position. None: each sample once, in a random order."""
    sample_weights: Any
    """(samples,): numbers >= 0 that are proportional to the probability that a training step draws a sample."""
    sample_labels: Any
    """(samples,): the label of each sample, numbers or texts, for `data.balance=label`. None: there are no labels."""
    labels: Any
    """As `sample_labels`, which comes first."""
    targets: Any
    """As `labels`, which comes first."""
    content_digests: Mapping[str, str]
    """Digests of the training data by what they are of. A checkpoint has them, and a resumed run compares them."""
    check_first: bool
    """True: before a new run trains, `check` is called once for each training sample, on one of the ranks."""
    notes: Sequence[str]
    """Lines for people about samples that were left out. Printed once, before the predictions of the inputs."""
    reads_forward: bool
    """True: `ReadsForward` is implemented. Only `lockstep.Stream` sets it."""

    def check(self, index: int) -> str | None:
        """A remark about a sample for people, or None. Raises DataError for a sample that cannot be used."""

    def where(self, index: int) -> str:
        """The file of a sample, for errors, captions and predictions."""

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        """The samples of a micro-batch, read at once in a loader worker, if the task has no `prepare`; as in torch."""


class ReadsForward(Protocol):
    """Training data that are read by ascending positions; see `streams.Stream`."""

    compared: Sequence[int]
    """The samples that a run compares over ranks, and with an earlier start."""

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Read the samples of a micro-batch, which are asked for next. Called in a loader worker."""

    def take_places(self) -> Sequence[Any]:
        """What reading has passed since the last call. Called in a loader worker, after a micro-batch."""

    def passed(self, marks: Sequence[Any]) -> None:
        """Micro-batches with these places have arrived in the process that trains."""


def member_of(data: Any, name: Member, default: Any = None) -> Any:
    """An optional member of a data set; `default` if it has none."""
    return getattr(data, name, default)


def forward(data: Any) -> ReadsForward | None:
    """The data, if they can only be read forward. None: they have samples by index."""
    return data if member_of(data, "reads_forward") is True else None


def name_of(data: Any, index: int) -> str:
    """The file of a sample, if the data set knows it; else the index."""
    where = member_of(data, "where")
    return str(where(index)) if where else f"{type(data).__name__}[{index}]"
