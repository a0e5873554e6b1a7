"""When it goes wrong: a rank that skips a step, and a barrier that only one rank reaches.

    torchrun --nproc-per-node 2 examples/tricks/12_failing_and_hanging.py
    ... --wrong unchecked   # does not compare the steps
    ... --wrong barrier     # a barrier inside `if rank == 0`

Rank 1 cannot read a sample of step 5, and continues with the next batch. The ranks are now one step apart.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from toy import digits, make_model, mistake, place, say, shuffled, start

BATCH = 64

wrong = mistake("unchecked", "barrier")
PATIENCE_S = 3 if wrong else 60
rank, world = start()
on_cpu = dist.new_group(backend="gloo")  # NCCL has no monitored barrier
images, labels = digits()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def wait(work, what):
    """Wait for a collective, but not forever. torch waits for 30 minutes with gloo, and for 10 with NCCL."""
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise SystemExit(f"rank {rank} has waited {int(time.monotonic() - began)} s {what}") from error


def send(tensor, step):
    """Add a tensor over the ranks. The ranks also compare the numbers of their steps."""
    if not wrong:
        steps = [torch.zeros((), dtype=torch.long, device=place()) for _ in range(world)]
        own = torch.tensor(step).to(place())
        wait(dist.all_gather(steps, own, async_op=True), f"in step {step} for the other ranks' steps")
        if len(set(map(int, steps))) > 1:
            raise SystemExit(f"rank {rank}: the ranks are at different steps: {[int(other) for other in steps]}")
    wait(dist.all_reduce(tensor, async_op=True), f"for the gradients of step {step}, after {mixed} mixed updates")


mixed = 0
try:
    for step, batch in enumerate(shuffled(len(labels), epoch=0).split(BATCH)):
        mine = batch[rank::world]
        if rank == 1 and step == 5 and wrong != "barrier":
            continue  # an unreadable sample
        optimizer.zero_grad()
        (cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        send(gradients, step)
        mixed += step >= 5
        places = gradients.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), places, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        if wrong == "barrier" and rank == 0 and step == 10:
            # Rank 0 saves, and waits for rank 1, which never arrives here. A monitored barrier names the missing rank.
            dist.monitored_barrier(on_cpu, timeout=timedelta(seconds=PATIENCE_S))
    if rank == 1:
        time.sleep(2 * PATIENCE_S)  # rank 1 has finished its last batch, and does something else, such as evaluating
except (SystemExit, RuntimeError) as error:
    say(str(error).splitlines()[0])
