"""Does the exact sum over micro-batches survive a pipeline of stages? torch's schedules beside plain torch, float64.

    python benchmarks/pipeline.py            # gradients: largest relative difference of a tensor, or what happens
    python benchmarks/pipeline.py --time     # a step of 2 stages beside DDP on the same 2 ranks

Each case starts its own ranks (gloo, CPU). The reference is one process: the sum of the losses of all micro-batches
over the number of labels of the whole batch. It shares the model and nothing else.
"""

import datetime
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

WORDS, WAIT_S, CPU = 17, 60, torch.device("cpu")
SHORTER, FILLED = "the last micro-batch is shorter", "the same, filled up with samples without labels"
OF_EACH, SCALED = "a mean for each micro-batch", "scale_grads=True (the default)"
TIED, UNEVEN = "tied embeddings, gradients added", "labels unevenly over micro-batches"
OTHER_LENGTHS, STATISTICS = "micro-batches of other lengths", "batch norm: largest difference of a statistic"
CASES = [UNEVEN, SCALED, OF_EACH, SHORTER, FILLED, OTHER_LENGTHS, "tied embeddings, each stage its own", TIED]
CASES += ["norm of one stage's gradients", "norm, squares added", "dropout, seeds by micro-batch"]
CASES += ["dropout, seeds by micro-batch and layer", "batch norm: gradients", STATISTICS]


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, batch_norm=False):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.norm = nn.BatchNorm1d(width) if batch_norm else None

    def forward(self, hidden):
        hidden = self.layer(hidden)
        return hidden if self.norm is None else self.norm(hidden.transpose(1, 2)).mT.contiguous()


def layers(width=16, depth=4, **options):
    """An embedding, blocks and a last layer, always with the same weights."""
    torch.manual_seed(0)
    blocks = [Block(width, **options) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS, bias=False))


def samples(count, length, draw):
    """Words and labels. Very different numbers of labels count: -100 marks those that do not."""
    words = torch.randint(0, WORDS, (count, length), generator=draw)
    counts = torch.rand(count, length, generator=draw) < torch.linspace(0, 1, count)[:, None] ** 2
    return words, words.roll(1, 1).where(counts, -100)


def loss_of(output, labels):
    return cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def cut(model, stage, stages):
    """The layers of a stage, under their names in the whole model."""
    ends = torch.linspace(1, len(model) - 1, stages + 1).int().tolist()
    ends[0], ends[-1] = 0, len(model)
    return model[ends[stage] : ends[stage + 1]]


def seeded(model, by_layer, first):
    """Begin the seed of each micro-batch anew as it enters a model, or each of its layers.

    Args:
        first: number of the first call. A stage runs once more before, to find out shapes.
    """
    for name, module in model.named_children() if by_layer else [("0", model)]:

        def before(*_, calls=iter(range(first, 10**6)), place=int(name)):  # noqa: B008
            torch.manual_seed(100 * next(calls) + place)

        module.register_forward_pre_hook(before)


def batches_of(case):
    draw = torch.Generator().manual_seed(1)
    found = [samples(4, length, draw) for length in ([6, 4, 6, 4] if case == OTHER_LENGTHS else [6] * 4)]
    if case == UNEVEN:
        found[0][1].fill_(-100)
    if case == SHORTER:
        found[-1] = tuple(each[:3] for each in found[-1])
    if case == FILLED:
        found[-1][1][3:] = -100
    return found


def gradients(rank, stages, schedule, case):
    """The largest relative difference of a gradient over all stages, or of what the case names."""
    tied, batches = case.startswith("tied"), batches_of(case)
    options = {"dropout": 0.1} if "dropout" in case else {"batch_norm": "batch norm" in case}
    whole, model = (layers(**options).double() for _ in range(2))
    units = sum(int((labels != -100).sum()) for _, labels in batches)
    if tied:
        whole[-1].weight = whole[0].weight
        model[-1].weight.data.copy_(model[0].weight.data)
    part = cut(model, rank, stages)
    seeded(whole, "layer" in case, first=0)
    seeded(part, "layer" in case, first=-1)
    for words, labels in batches:
        (loss_of(whole(words), labels) / units).backward()

    def loss(output, labels):
        return loss_of(output, labels) / (max(1, int((labels != -100).sum())) if case == OF_EACH else units)

    stage = PipelineStage(part, rank, stages, CPU)
    made = schedule(stage, len(batches), loss_fn=loss, scale_grads=case in (SCALED, OF_EACH))
    stage.has_backward = True
    words = [((each,) if rank == 0 else ()) for each, _ in batches]
    labels = [each for _, each in batches] if stage.is_last else None
    made._step_microbatches(words, [{}] * len(batches), labels)  # `step` itself cuts a batch into equal parts
    if case == TIED and (stage.is_first or stage.is_last):
        ends = dist.new_group([0, stages - 1], use_local_synchronization=True)
        dist.all_reduce(part.get_parameter(f"{0 if stage.is_first else len(model) - 1}.weight").grad, group=ends)
    known = dict(whole.named_parameters()) | ({f"{len(model) - 1}.weight": whole[0].weight} if tied else {})
    worst = max(float((p.grad - known[n].grad).norm() / known[n].grad.norm()) for n, p in part.named_parameters())
    if case.startswith("norm"):
        square = nn.utils.get_total_norm([p.grad for p in part.parameters()]).square()
        if "added" in case:
            dist.all_reduce(square)
        worst = float((square.sqrt() / nn.utils.get_total_norm([p.grad for p in whole.parameters()]) - 1).abs())
    if case == STATISTICS:
        known = dict(whole.named_buffers())
        worst = max([float((b - known[n]).abs().max()) for n, b in part.named_buffers() if b.ndim], default=0.0)
    dist.all_reduce(found := torch.tensor(worst, dtype=torch.float64), op=dist.ReduceOp.MAX)
    return f"{float(found):.1e}"


def timed(rank, stages, micro_batches, rounds=9, width=256, count=32):
    """Medians in ms of a step of a pipeline, and of DDP on the same ranks and samples."""
    words, labels = samples(count, 64, torch.Generator().manual_seed(1))
    part, ddp = cut(layers(width, 8), rank, stages), nn.parallel.DistributedDataParallel(layers(width, 8))
    made = Schedule1F1B(PipelineStage(part, rank, stages, CPU), micro_batches, loss_fn=loss_of, scale_grads=False)
    mine = slice(rank * count // stages, (rank + 1) * count // stages)
    given = ([words] if rank == 0 else []), labels if rank == stages - 1 else None
    steps = {
        "pipeline": lambda: made.step(*given[0], target=given[1], return_outputs=False),
        "ddp": lambda: loss_of(ddp(words[mine]), labels[mine]).backward(),
    }
    found = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            dist.barrier()
            found[name].append(1000 * (time.perf_counter() - begun))
    return [statistics.median(times[2:]) for times in found.values()]


def _rank(rank, world, store, answers, function, *arguments):
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": world, "timeout": datetime.timedelta(seconds=WAIT_S / 3)}
    dist.init_process_group("gloo", f"file://{store}", **options)
    try:
        answers.put((rank, function(rank, world, *arguments)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {str(error).strip().splitlines()[0].rpartition('] ')[2]}"))
    answers.close()
    answers.join_thread()
    os._exit(0)  # a rank may hang in a thread of gloo


def on_ranks(world, function, *arguments, wait_s=WAIT_S):
    """What the ranks answered, by rank."""
    context, found = multiprocessing.get_context("fork"), {}
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = (world, f"{folder}/store", answers, function, *arguments)
        ranks = [context.Process(target=_rank, args=(rank, *common)) for rank in range(world)]
        [each.start() for each in ranks]
        try:
            while len(found) < world:
                found |= dict([answers.get(timeout=wait_s)])
        except queue.Empty:
            found |= {rank: "no answer" for rank in range(world) if rank not in found}
        [each.kill() for each in ranks]
    return found


if __name__ == "__main__":
    is_timed = "--time" in sys.argv
    print("| micro-batches | pipeline, ms | DDP, ms |" if is_timed else "| case | stages | GPipe | 1F1B |")
    for number in (2, 4, 8) if is_timed else ():
        print(
            f"| {number} | {' | '.join(f'{ms:.0f}' for ms in on_ranks(2, timed, number, wait_s=600)[0])} |", flush=True
        )
    for case, stages in [(case, stages) for case in CASES if not is_timed for stages in (2, 4)]:
        both = [on_ranks(stages, gradients, schedule, case) for schedule in (ScheduleGPipe, Schedule1F1B)]
        cells = ["; ".join(dict.fromkeys(found[rank] for rank in sorted(found, reverse=True))) for found in both]
        print(f"| {case} | {stages} | {' | '.join(cells)} |", flush=True)
