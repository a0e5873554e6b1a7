"""Losses over yes/no questions with many unknown answers. All are sums over units, which are counted from labels only.

Labels are (B, Q): 1 for yes, 0 for no, NaN for unknown. The units of a loss are, by `reduction`:

- `question`: the known labels (for survival: the pairs of a patient and an outcome with a known label);
- `patient`: the patients with a known label. The terms of a patient are averaged, so that a patient with many answers
  counts as much as a patient with a single answer.

So the sum of the losses divided by the sum of the units is the same, however a global batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Reduction = Literal["question", "patient"]


def positive_weights(labels: Tensor) -> Tensor:
    """Known negatives / known positives of each question: (Q,) float32. 1 if either is missing. With these weights, the
    positives and the negatives of a question contribute equally to the loss.

    Args:
        labels: the training labels, (n, Q).
    """
    positives, negatives = (labels == 1).sum(dim=0), (labels == 0).sum(dim=0)
    return torch.where((positives > 0) & (negatives > 0), negatives / positives.clamp_min(1), 1.0).float()


def answer_units(labels: Tensor, reduction: Reduction) -> Tensor:
    """The number of units of `answer_loss`, a scalar."""
    known = ~labels.isnan()
    return known.sum() if reduction == "question" else known.any(dim=1).sum()


def answer_loss(
    logits: Tensor, labels: Tensor, *, reduction: Reduction, positive_weight: Tensor | None = None
) -> Tensor:
    """The sum of binary cross-entropies over the units: a scalar.

    Args:
        logits: (B, Q).
        labels: (B, Q).
        positive_weight: factor of the term of a positive answer, (Q,), as `pos_weight` of torch's
            `binary_cross_entropy_with_logits`. Units are not weighted. None: 1.
    """
    known = ~labels.isnan()
    answers = labels.nan_to_num().to(logits.dtype)
    terms = functional.binary_cross_entropy_with_logits(logits, answers, pos_weight=positive_weight, reduction="none")
    # `where` instead of a product: otherwise the gradient of an infinite logit would be NaN.
    return _reduced(torch.where(known, terms, 0.0), known, reduction)


def survival_units(labels: Tensor, outcomes: Sequence[Sequence[int]], reduction: Reduction) -> Tensor:
    """The number of units of `survival_loss`, a scalar."""
    known = torch.stack([(~_columns(labels, group).isnan()).any(dim=1) for group in outcomes], dim=1)
    return known.sum() if reduction == "question" else known.any(dim=1).sum()


def survival_loss(logits: Tensor, labels: Tensor, outcomes: Sequence[Sequence[int]], *, reduction: Reduction) -> Tensor:
    """The sum of the negative log-likelihoods of discrete survival times, over the units: a scalar.

    Let S(k) be the probability of no event until horizon k, and S(0) = 1. Let a be the farthest horizon with the answer
    no (0 if there is none), and b the nearest horizon with the answer yes. The likelihood of a patient is S(a) - S(b):
    the event is in the interval (a, b]. Without a yes it is S(a): the time is censored. If a and b are neighbours,
    this is the likelihood of Singer and Willett 1993, doi:10.3102/10769986018002155, h_b (1 - h_a) ... (1 - h_1).
    Blanks between a and b are interval censoring (Kalbfleisch and Prentice 2002, section 3.9).

    Args:
        logits: of the risks until each horizon, (B, Q), not decreasing within an outcome: from the head `hazard` or
            `monotone`.
        labels: (B, Q), without a no after a yes.
        outcomes: for each outcome the numbers of its questions, from the nearest horizon to the farthest.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    terms, knowns = [], []
    for group in outcomes:
        answers = _columns(labels, group)
        log_survival = functional.logsigmoid(-_columns(logits, group))
        log_survival = torch.cat([torch.zeros_like(log_survival[:, :1]), log_survival], dim=1)  # horizon 0
        horizon = torch.arange(1, len(group) + 1, device=labels.device)
        last_no = torch.where(answers == 0, horizon, 0).amax(dim=1, keepdim=True)
        first_yes = torch.where(answers == 1, horizon, len(group) + 1).amin(dim=1, keepdim=True)
        is_censored = first_yes > len(group)
        until_no = log_survival.gather(1, last_no)
        until_yes = log_survival.gather(1, first_yes.clamp_max(len(group)))
        # log(S(a) - S(b)) = log S(a) + log(1 - S(b) / S(a)); the clamp avoids an infinite loss for equal risks.
        tiny = torch.finfo(logits.dtype).eps
        ratio = torch.where(is_censored, -1.0, until_yes - until_no).clamp_max(-tiny)
        event = torch.log(-torch.expm1(ratio))
        terms.append(-(until_no + torch.where(is_censored, 0.0, event))[:, 0])
        knowns.append((~answers.isnan()).any(dim=1))
    known = torch.stack(knowns, dim=1)
    return _reduced(torch.where(known, torch.stack(terms, dim=1), 0.0), known, reduction)


def _columns(values: Tensor, numbers: Sequence[int]) -> Tensor:
    """Some columns of (B, Q). A list as an index would be copied to the device, and the host would wait for it."""
    return torch.stack([values[:, number] for number in numbers], dim=1)


def _reduced(terms: Tensor, known: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "question":
        return terms.sum()
    return (terms.sum(dim=1) / known.sum(dim=1).clamp_min(1)).sum()
