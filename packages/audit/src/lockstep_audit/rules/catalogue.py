"""All rules, in the order of their ids."""

from __future__ import annotations

import importlib

from lockstep_audit.findings import Rule
from lockstep_audit.rules import facts

_TRAINING = "data shares gradients sums steps unwrapped scaling optimizers schedules accumulation"
for _module in f"{_TRAINING} collectives results evaluation weights gathered_evaluation files".split():
    importlib.import_module(f"lockstep_audit.rules.{_module}")
ALL: tuple[Rule, ...] = tuple(sorted(facts.RULES, key=lambda rule: rule.id))
BY_ID = {rule.id: rule for rule in ALL}
_FOLLOWS = (
    "LS105: LS103 LS110; LS106: LS103; LS108: LS103 LS105; LS111: LS101; LS112: LS103 LS105 LS110; "
    "LS201: LS202 LS203 LS204 LS205 LS206 LS301 LS302 LS303 LS305 LS207 LS209; LS204: LS202; "
    "LS206: LS104 LS305 LS501 LS503; LS301: LS302; LS307: LS306; LS308: LS303; LS309: LS303; LS403: LS402; "
    "LS408: LS310; LS502: LS501 LS104; LS503: LS104 LS206; LS504: LS501 LS104"
)
EXPLAINED = {id: tuple(others.split()) for id, others in (each.split(": ") for each in _FOLLOWS.split("; "))}
"""Findings of the first rule follow from those of the others, and are left out if these are present."""
