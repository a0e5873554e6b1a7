"""Checks on every rank before anything expensive: facts about the ranks, and a judgement of them."""
