"""Checks on every rank before anything expensive: facts of the ranks, and a judgement of them."""
