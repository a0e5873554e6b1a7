"""Proof while a training runs: checks that all ranks compute the same, and verdicts on silent data corruption."""
