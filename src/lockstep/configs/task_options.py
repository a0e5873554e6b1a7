"""The options of a task: the keys of the config's `task` section. Importing them loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from lockstep.core.config.config_section import Section

MISSING = ("NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "-nan", "NaT", "NULL", "Null", "null", "None")
"""Fields of a CSV file without a value, as pandas and databases write them."""


class TaskOptions(Section):
    """Base of the options of a task.

    A distribution declares a subclass by name, in the entry point group `lockstep.tasks`. Unknown keys and values of a
    different type are errors.
    """

    task: ClassVar[str]
    """The task class, as `module:Class`. It is text, so that options can be read without importing torch.

    Its constructor takes an object of this class as first argument, and `train` and `eval` if it has such parameters.
    """

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that ranks need besides the task's own, for the process from which ranks are forked."""

    def suggestions(self) -> dict[str, dict[str, Any]]:
        """Values of other sections that suit this task.

        They apply to keys that neither a file nor the command line sets.
        """
        return {}

    def for_epochs(self, epochs: int | None) -> Self:
        """These options for a training of this many epochs. None: the length is not known, or nothing is trained.

        Raises:
            ValueError: an option needs the number of epochs. The text begins with its key and a colon.
        """
        return self

    def never_reached(self, epochs: int) -> dict[str, str]:
        """The options that are needed, but never reached in this many epochs: a sentence and a remedy by key."""
        return {}


class TableOptions(TaskOptions):
    """Options of tasks that read tables."""

    header: bool = True
    """True if the first line of a CSV file names the columns. Otherwise the columns are called 0, 1, ..."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Delimiter of a CSV file. None: a tab for .tsv, else a comma."""
    quoting: Literal["minimal", "none"] | None = None
    """Quoting of a CSV file. `minimal`: a field may be in double quotes. `none`: quotes are letters.

    None: `none` for .tsv, `minimal` for .csv.
    """

    missing: list[str] | None = None
    """Fields of a CSV file that contain no value. With `[]`, `None` may be a class.

    None: those that pandas and databases write, such as NA, nan, None and NULL.
    """

    def of_csv(self) -> dict[str, Any]:
        """These options, as `lockstep_recipes.tasks.readers.table.Source` takes them."""
        missing = MISSING if self.missing is None else tuple(self.missing)
        return {"header": self.header, "delimiter": self.delimiter, "quoting": self.quoting, "missing": missing}
