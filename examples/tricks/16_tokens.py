"""Texts differ in length: the unit of a language model's loss is the token. Ranks sum, and divide by all tokens.

torchrun --nproc-per-node 2 examples/tricks/16_tokens.py
torchrun --nproc-per-node 2 examples/tricks/16_tokens.py --wrong   # the mean of the means of micro-batches and ranks
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from toy import mistake, place, say, start

LONG = "the loss of a language model is a sum over tokens and its mean divides this sum by all tokens of the batch "
ANSWERS = ["yes", "no", "42", "maybe", "7", "never", "blue", "no"]
TEXTS = [text for answer in ANSWERS for text in (answer, LONG[: 40 + 8 * len(answer)])]  # each second text is short
MICRO = 4


def make_model():
    """From a letter to the next letter."""
    torch.manual_seed(0)
    return nn.Embedding(128, 128)


def loss_of(model, texts):
    """The sum of the loss over the tokens of some texts, and the number of tokens."""
    pairs = [torch.tensor(list(text.encode("ascii"))).to(place()) for text in texts]
    inputs, targets = (torch.cat(parts) for parts in zip(*((ids[:-1], ids[1:]) for ids in pairs), strict=True))
    return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


wrong = mistake("means")
rank, world = start()
order = sorted(TEXTS, key=len)  # texts of similar length share a micro-batch, which saves padding
micros = [order[first : first + MICRO] for first in range(0, len(order), MICRO)][rank::world]
model = make_model().to(place())
tokens = torch.tensor(float(sum(loss_of(model, texts)[1] for texts in micros))).to(place())
dist.all_reduce(tokens)
shown = torch.zeros((), device=place())
for texts in micros:
    loss, count = loss_of(model, texts)
    share = loss / (count * len(micros) * world) if wrong else loss / tokens
    share.backward()
    shown += share.detach()
dist.all_reduce(shown)
dist.all_reduce(model.weight.grad)

reference = make_model().to(place())
loss, count = loss_of(reference, TEXTS)
(loss / count).backward()
apart = (model.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm()
counts = sorted(loss_of(reference, order[first : first + MICRO])[1] for first in range(0, len(order), MICRO))
weights = [count / (counts_of * len(counts)) if wrong else 1.0 for counts_of in counts]
say(f"tokens of the micro-batches: {', '.join(map(str, counts))}")
say(f"weight of a token in each: {', '.join(f'{weight:.2f}' for weight in weights)}")
say(f"loss: {shown:.4f}, of all texts at once {loss / count:.4f}")
say(f"distance of the gradient from that of all texts at once: {apart:.1e}")
