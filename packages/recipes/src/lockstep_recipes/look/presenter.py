"""Base class for the texts of recipes: a log begins with the data, and with what is wrong in them."""

from __future__ import annotations

from lockstep.core.presenter import Presenter
from lockstep_recipes.look.look import head


class DataPresenter(Presenter):
    """Describes the data of a task with `finders`."""

    def of_run(self) -> list[str]:
        """Lines about the data, the model and what the recipe decided."""
        raise NotImplementedError

    def log_header(self) -> list[str]:
        """`of_run`, and a line for each fault in a small sample of the data."""
        return [*self.of_run(), *head(self.task)]
