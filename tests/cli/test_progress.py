"""A bar counts on a terminal, and there is none elsewhere."""

import io

from rich.console import Console

from lockstep.cli import progress


def test_a_bar_counts_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.bar("predicting", shown=True, console=console) as bar:
        bar.begin(3)
        for _ in range(3):
            bar.advance()
    assert "predicting" in console.file.getvalue()
    assert "3/3" in console.file.getvalue()


def test_a_bar_that_never_began_and_a_hidden_bar_write_nothing(capfd):
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress.bar("predicting", shown=True, console=console):
        pass
    assert console.file.getvalue().strip() == ""
    with progress.bar("predicting", shown=False) as bar:
        bar.begin(2)
        bar.advance()
    assert capfd.readouterr() == ("", "")
