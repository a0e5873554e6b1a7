"""Proof while a run trains: checks of all ranks, experiments and verdicts, replays of steps in this process."""
