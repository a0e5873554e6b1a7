"""The base class of a config section, and what may be declared next to its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator


@dataclass(frozen=True)
class _Determines:
    """Marks a key, or a whole section, in an `Annotated` type.

    The innermost marker counts. Without one, a key determines.
    """

    yes: bool


DETERMINES_TRAINING = _Determines(True)
"""A different value trains a different model. A run is not continued with a different value."""
DOES_NOT_DETERMINE = _Determines(False)
"""A different value trains the same model. A run may be continued with a different value."""


class Section(BaseModel):
    """A section of the config. Unknown keys are errors, and so are values of the wrong type: `yes` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys that exclude each other. A key on the command line takes the place of the other key in a file."""

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        fields = type(self).model_fields
        for pair in self.alternatives:
            if all(getattr(self, key) != fields[key].default for key in pair):
                raise ValueError(f"give either {pair[0]} or {pair[1]}, not both")
        return self


def determines(metadata: list[object], otherwise: bool) -> bool:
    """True if a key with these annotations determines the training; `otherwise` if no marker is among them."""
    return next((marker.yes for marker in metadata if isinstance(marker, _Determines)), otherwise)
