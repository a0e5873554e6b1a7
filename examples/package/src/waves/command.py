"""A command: a function in Typer's style."""


def wave_length(cycles: int = 2) -> None:
    """Print the length of a wave."""
    print(f"{2 / cycles:.3f}")
