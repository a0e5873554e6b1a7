"""Turn the vector of a volume into a logit for each question.

All heads return logits whose sigmoid is the risk, so losses and metrics do not depend on the head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.errors import UsageError

HeadName = Literal["question", "monotone", "hazard"]


def make_head(kind: HeadName, width: int, questions: int, outcomes: Sequence[Sequence[int]] | None = None) -> nn.Module:
    """A head by name.

    Args:
        width: length of a volume's vector.
        questions: the number of questions.
        outcomes: for each outcome the numbers of its questions, from the nearest horizon to the farthest. None: all
            questions belong to one outcome, in their order. The head `question` ignores this.

    Raises:
        UsageError: `outcomes` does not name each question once.
    """
    if kind == "question":
        return QuestionHead(width, questions)
    groups = check_outcomes(outcomes, questions)
    return MonotoneHead(width, groups) if kind == "monotone" else HazardHead(width, groups)


def check_outcomes(outcomes: Sequence[Sequence[int]] | None, questions: int) -> list[list[int]]:
    """The numbers of the questions of each outcome.

    Raises:
        UsageError: a question is missing, or occurs twice.
    """
    groups = [list(range(questions))] if outcomes is None else [list(group) for group in outcomes]
    if sorted(number for group in groups for number in group) != list(range(questions)):
        remedy = f"name each of the {questions} questions once"
        raise UsageError(f"the outcomes are {groups}", where="task.outcomes", remedy=remedy)
    return groups


class QuestionHead(nn.Module):
    """A separate logit for each question."""

    def __init__(self, width: int, questions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, questions)

    def forward(self, vectors: Tensor) -> Tensor:
        """Logits (B, questions) of vectors (B, width)."""
        logits: Tensor = self.linear(vectors)
        return logits


class MonotoneHead(nn.Module):
    """Risks that never decrease from one horizon of an outcome to the next.

    The logit of the first horizon is linear in the vector. Each later horizon adds softplus(a linear function), which
    is positive.
    """

    def __init__(self, width: int, outcomes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.outcomes = [list(group) for group in outcomes]
        self.linear = nn.Linear(width, sum(map(len, self.outcomes)))

    def forward(self, vectors: Tensor) -> Tensor:
        """Logits (B, questions) of vectors (B, width)."""
        # Column by column: a list of indices would be copied from the host, and CUDA's cumsum is not deterministic.
        raw = self.linear(vectors).unbind(dim=1)
        columns: dict[int, Tensor] = {}
        for first, *later in self.outcomes:
            steps = [raw[first], *(functional.softplus(raw[number]) for number in later)]
            columns |= zip([first, *later], itertools.accumulate(steps, torch.add), strict=True)
        return torch.stack([columns[number] for number in sorted(columns)], dim=1)


class HazardHead(MonotoneHead):
    """Discrete-time survival: the probability of an event in each interval, given that there was none before.

    The hazard of interval j is h_j = sigmoid(linear function), and the risk until horizon k is
    1 - (1 - h_1) ... (1 - h_k): Singer and Willett 1993, doi:10.3102/10769986018002155; for networks Gensheimer and
    Narasimhan 2019, arXiv:1805.00917. The head returns the logits of these risks.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """Logits (B, questions) of the risks, for vectors (B, width)."""
        raw = self.linear(vectors)
        raw = raw if raw.dtype == torch.float64 else raw.float()  # logits of small risks need more than 16 bits
        log_stays = functional.logsigmoid(-raw).unbind(dim=1)  # by columns, as in `MonotoneHead`
        columns: dict[int, Tensor] = {}
        for group in self.outcomes:
            for number, log_survival in zip(
                group, itertools.accumulate((log_stays[n] for n in group), torch.add), strict=True
            ):
                log_risk = (-torch.expm1(log_survival)).clamp_min(torch.finfo(raw.dtype).tiny).log()
                columns[number] = log_risk - log_survival
        return torch.stack([columns[number] for number in sorted(columns)], dim=1)
