"""What the ranks of a script did, as events: the only connection between observers and rules.

Observers run inside the script (`audit.observe`). Each rank appends events to its own file, one JSON object per line,
so whatever ends the script, earlier events are kept. Rules (`audit.rules`) are pure functions over the events of all
ranks. They import neither torch nor an observer.

Every event has these keys: `kind`; `rank`; `number` (of the event on its rank, from 0); `time` (seconds since the
epoch); `step` (optimizer steps that this rank has finished, over all optimizers: the first `step` event has 0). If a
line of the script caused the event, it also has `at`: `[file, line, function]` of the innermost frame of the user's
code, which is neither the standard library, nor an installed package, nor Lockstep. The file is absolute. Keys that do
not apply are left out. A place is such a list. An `id` is a number that a rank gives to an object, in order of
appearance. The ids of one object agree across ranks only if all ranks ran the same code, so rules match objects by
`at` or `made_at`.

    kind          written when                              keys
    ------------  ----------------------------------------  ------------------------------------------------------------
    start         observers are installed                   world_size, local_rank, pid, host, script (path), argv,
                                                            torch, python, every (sampling), is_child (of the script's
                                                            process: mp.spawn)
    framework     accelerate, lightning and the like are    name, version
                  imported
    group         a process group is made                   name, ranks, backend, timeout_s
    device        the first optimizer step                  device ("cpu", "cuda:0"), uuid (of a GPU)
    split         torch.utils.data.random_split; Subset by  lengths, digest (of the drawn indices), by (what took
                  the script; datasets, sklearn             them, if not random_split: then the digest is
                                                            of the first 1,000, or of sklearn's random state)
    order         torch.randperm, shuffle and the like by   length, digest
                  the script
    generator     torch.set_rng_state, random.setstate,     digest (of the state)
                  numpy.random.set_state by the script
    set_epoch     DistributedSampler.set_epoch              sampler (id), epoch
    loader        an iteration over a DataLoader begins     loader (id), made_at, epoch (iterations of this loader
                                                            before), dataset (class name), dataset_size, batches
                                                            (len(loader), of this rank), batch_size, drop_last,
                                                            num_workers, is_iterable, sampler (id), sampler_kind (class
                                                            name, of the innermost sampler), shuffles (bool or null),
                                                            distributed: {replicas, rank, shuffle, epoch, seed,
                                                            drop_last, total_size, kind (class name)} of a
                                                            DistributedSampler in it, or of Accelerate's
                                                            BatchSamplerShard {kind, replicas, rank, even_batches,
                                                            split_batches}; shared_twice (a second such sampler within
                                                            the first), subset (digest of the indices of Subsets),
                                                            mapped (of the first epoch: the index below all Subsets
                                                            for each index), defined_in (file of the data set's class),
                                                            sampler_at (where the script made the sampler that deals),
                                                            dataset_at (where it made the data set), skips: [n,
                                                            place] of Accelerate's skip_first_batches,
                                                            reordered: {kind, at} of the sampler of the script's loader
                                                            of these data, whose order a sampler of this shuffles,
                                                            generators (digest of the states of those that a stream or
                                                            its loader holds),
                                                            held (whole numbers of a sampler of the script),
                                                            sampler_in (file of its class),
                                                            by_framework (the script does not iterate itself)
    indices       every 50 batches, and at an epoch's end   loader, epoch, first (number of the first batch), batches:
                                                            [[index, ...], ...] of map-style data; at most 100,000
                                                            indices an epoch
    batch         sampled batches that a loader gave        loader, epoch, batch (number), digests: [of each tensor],
                                                            elements (of the largest tensor),
                                                            samples (first dimension of the first tensor), digest (of
                                                            all tensors), valid (labels
                                                            that are not -100, if any is),
                                                            shifted (these without the first
                                                            of each row)
    loader_end    an iteration ends, also at exit           loader, epoch, batches (given), samples, is_complete (it was
                                                            exhausted), backwards, optimizer_steps, forwards_training,
                                                            forwards_eval (of watched models, during it),
                                                            collectives_python (torch.distributed calls during it),
                                                            gathered (gather_for_metrics or the like removed
                                                            duplicates), joined (in or after a `join`). Frameworks draw
                                                            batches ahead: then the counts continue to the next
                                                            iteration begins, and the event is written then
    join          a `join` begins                           (only `at`)
    probe         the process group ends, or at exit: the   loader, dataset_size, samples: {index: [of each field]}: a
                  script has computed all it computes       list of whole numbers, or a digest, or null (random, or of
                                                            an unknown type)
    stream        the 8th sample of a stream that           shards, samples: [[of each field, as in `probe`], ...]
                  Accelerate's IterableDatasetShard deals
    dispatched    Accelerate prepares a stream that the     parts: {name: a number, or the least digests of a list} of
                  first rank reads for all (`at`: of the    the data set's attributes that its functions use; asks:
                  loader that the script made)              {name: [a number, "rank" or "ranks", place]} of what its
                                                            functions read outside of it while it is read
    inputs        the first training forward pass of each   model, digest, elements (of the largest tensor)
                  of the first 6 steps
    vocabulary    the first backward pass                   ids: {variable: {word: number}} of a sample of the words
                                                            that dictionaries of the script number one for one
    class_weights the first loss of torch.nn.functional     digest, classes
                  with weights of classes, for each line
    labels        the first loss of each line whose columns first (label), rows; `at`: of torch.arange, if known
                  are the rows of all ranks, and whose
                  labels are first, first + 1, ...
    drawn         torch.randn, rand and the like by the     digest
                  script, in steps 1 to 8
    gather        Accelerator.gather by the script          (only `at`)
    gathered      a gather of what needs a gradient, whose  remedy (of Lightning)
                  result is a constant factor in a loss
    padded        Accelerator.pad_across_processes of       index (pad_index), ignored (it has -100), held (it has
                  whole numbers                             index), added (elements, on this rank)
    padding       a metric of gathered rows that were       by, by_at (the metric), rows, own (without padding; -1: not
                  padded to the longest shard (`at`: of the known)
                  gather)
    frozen        the first call of a module that gets no   class, digest, names_digest (with shapes), made_from,
                  gradient, and that no wrapper and no      is_early, changes (as in `copies` of exit)
                  optimizer has
    frozen_part   the first call of a part of a model of    model, names (of its parameters)
                  DDP whose parameters get no gradient
    log           LightningModule.log of a number in an     name, value, exchanged (sync_dist), only_zero, world,
                  evaluation on several ranks; Trainer.log  decides (which checkpoint is the best; of a Trainer)
                  by the script, of eval_ and test_ metrics
                  and of statistics of training             is_training (statistics of training)
    scaled_loss   transformers' Trainer.compute_loss, which op (the last of the loss before), mean (bool), by, model
                  multiplied a loss by the number of ranks  (class; None: a function of the script, whose line is `at`)
    floor_division a sum over ranks // the number of ranks  divisor, remainder (bool)
    schedule      at exit, of each scheduler                made_at, name (class), horizon (steps that it was made for),
                                                            lengths: [n] (numbers of a function of the script at
                                                            which its factor no longer falls),
                                                            steps, is_outer (no other scheduler steps it),
                                                            optimizer_steps (of its optimizer)
    text          at exit, of each file of rows that the    path, lines
                  script opened to write (csv, txt, jsonl)
    rename        os.rename, os.replace, shutil's copies    path, to
    read          open(..., "r") by the script              path, how, mode
    wrap          DDP(...), FSDP(...), DataParallel(...),   model (id), how ("ddp", "fsdp1", "fsdp2", "data_parallel"),
                  fully_shard(...) of a root                class, group, parameters (number of tensors), trainable,
                                                            frozen: [name, ...] (at most 50), names_digest,
                                                            find_unused, static_graph, buffers, modal (modules such as
                                                            dropout), ranks (of the group),
                                                            ignored: [name, ...] (that DDP does not exchange),
                                                            before (digest of the parameters before DDP made them
                                                            equal), synced (broadcast_buffers of DDP)
    bypass        the first time that a watched model's     model, forwards_bypassed; `at` is the line outside of it;
                  module is called with gradients, in       part (a part of the module was called, or a parameter
                  training, without its wrapper             used, and no pass of the wrapper before the backward)
    write         copy_, normal_ and the like outside of    name, digest (of what was written to, afterwards)
                  optimizers, to a parameter of a model of
                  DDP; at most 24 of each line
    unfrozen      parameters whose requires_grad differs    model, names: [name, ...]
                  from the wrapping, at a sampled optimizer   (now trainable; frozen: now frozen)
                  step or every 10th                        added: those that came after the wrapping; unowned:
                                                            those in no optimizer; `at`: of requires_grad_(), or of
                                                            BaseFinetuning; at_step: only the step's
    optimizer     the first step of an optimizer            optimizer (id), class, made_at, groups: [{parameters, lr,
                                                            ...}], hyperparameters by group without parameters; owned
                                                            (its parameters that watched models have), foreign (those
                                                            that no watched model has), missing: {model id: names of
                                                            trainable parameters of that model in no optimizer so far},
                                                            left_out (the same, of those that have a gradient),
                                                            untrained: [{names, at}] (modules outside of watched models
                                                            with a gradient that no optimizer has, and where each was
                                                            made: the innermost line first),
                                                            unwrapped (names that steps have for foreign parameters),
                                                            gradients_none (of its parameters, at this step),
                                                            unwrapped_from (where the module of these was made: the
                                                            innermost line first), partly_at (where other parts of
                                                            their model were wrapped), initial (before its first
                                                            step, of some parameters without a wrapper: as in step),
                                                            constant (names of those whose numbers are all the same),
                                                            prepared (by Accelerate)
    step          every step of an optimizer                optimizer, index (its own steps, from 0), backwards: [{at,
                                                            synced (bool: gradients of a watched DDP model were
                                                            exchanged; left out: not DDP), flag_set_late (bool),
                                                            forwards (training forward passes through the wrapper since
                                                            the backward before), loss (number) and ops (names of the
                                                            last autograd functions that made the loss, the last first;
                                                            `DivBackward0` is a division) and divisor (what these
                                                            divided by; 1: nothing), of sampled steps}]
                                                            since the last step of any optimizer; of this optimizer,
                                                            if there is none (two optimizers, one backward);
                                                            micro_batches: [{loader,
                                                            batch, samples, valid (labels that are not -100, if any),
                                                            shifted (these without the first of each row)}]
                                                            given since the last step, hyperparameters: [{lr, ...}] by
                                                            group, if they changed; clips: [{at, how ("norm",
                                                            "value"), limit, norm, backwards_before}];
                                                            scaler: {scale, found_inf, unscaled_before_clip}; skipped
                                                            (the scaler skipped the step);
                                                            sampled (bool); of sampled steps of models with replicas:
                                                            model (left out: no watched model has the parameters; names
                                                            are then GROUP.NUMBER), gradients and parameters:
                                                            {name: digest} (after the step; gradients before; a missing
                                                            gradient is null; no shards),
                                                            gradient_norm (local, before the step; 0: no gradient),
                                                            scaling (one factor of all shards of FSDP since the
                                                            backward pass, if there is one), was_cleared (a
                                                            backward pass since the step before began without
                                                            gradients). In backwards: evaluating (the model was in
                                                            evaluation mode; the place of eval(), if known),
                                                            unsynced_at, unsynced_by_user (who called no_sync()),
                                                            loss_at (of the loss, where a framework calls backward),
                                                            divided_at (where the script divided by the divisor),
                                                            labels (that the loss is a mean of, if some are ignored),
                                                            rows (the same, if none is), factor (what the script
                                                            multiplies the loss with),
                                                            terms: [{divisor, at, factors, ranks, of, is_once}]
                                                            of sums of so many numbers in the loss that it
                                                            divides by a sum over ranks, and multiplies,
                                                            by_ranks (the function that calls backward knows the
                                                            number of ranks), discarded (all gradients of the pass
                                                            before were gone when this one began, and no optimizer
                                                            stepped between; left out: it is the first of the step, or
                                                            parameters changed), cleared_at (by zero_grad() there),
                                                            began_clear (the same, also if parameters changed), sum_of
                                                            (numbers whose sum the loss is), reduced: {at, elements,
                                                            ranks, divisor, times} of a sum over ranks in the loss,
                                                            one_of (it is a mean of this many, and one has a gradient).
                                                            rescaled (the one factor of all gradients between the last
                                                            backward pass and a clip or the step), rounded: {name:
                                                            [values with a gradient, those that stayed the same]} of
                                                            16-bit parameters.
                                                            rewritten (after a discarded pass: gradients are not those
                                                            of the last pass, scaled or summed). norm_at (where the
                                                            script took the norm of a shard of a gradient). In
                                                            clips: reduced_before (the script had reduced gradients)
    hand_reduce   dist.all_reduce of gradients by the       model, optimizer, op, parameters (number), divided (bool:
                  script, once for each line; `step` is     the script divided by the number of ranks, before or after
                  that of the optimizer step that follows   the all-reduce; left out: not known, or clipped or scaled
                                                            between), factor (what the script multiplied by in all).
                                                            A loss divided before its backward shows in `ops` only.
                                                            unwaited (asynchronous, and nobody called wait())
    copy_reduce   an optimizer steps after copies of its    optimizer
                  gradients were summed over ranks, and none
                  came back to its gradient
    scheduler     a scheduler's step, where the number of   scheduler (id), class, per_step (its steps since the last
                  steps since the last optimizer step is    optimizer step), metric (of ReduceLROnPlateau), lr
                  not the number of before
    asked         the script sets a flag of Lightning's     what (should_stop, should_training_stop, should_save, ...)
                  Trainer or of a TrainerControl to true
    stopped       fit of Lightning, or train of
                  transformers, ended early
    hook          DDP.register_comm_hook                    model, name
    hand_average  dist.all_reduce or broadcast of           model, collective, op, elements
                  parameters after the first step, once
                  for each line
    own_buffers   before a training forward pass of DDP,    model, sums: {name: [a weighted sum, norm, elements]} of
                  which overwrites buffers with those of    layers of the script without normalizations, files:
                  rank 0, after each sampled step           {name: [of the classes]}, classes: {name: class}
    buffers       a watched model's first evaluation        model, digests: {name: digest}
                  forward after training
    weights       a model of DDP's first evaluation         model, digests: {name: digest} of parameters, path (places
                  forward after training, eval() or a load  of the user that led here, the innermost first), changed:
                                                            {at (such a path), before: {name: digest}} of a load
                                                            of its weights since the last training forward, inputs
                                                            (digest)
    collective    torch.distributed calls of Python, at     op, group, shape, dtype, reduce_op, sequence (of calls in
                  most 2,000 for each line                  this group), divided_integer (bool), root (src or dst),
                                                            names: {variable: text} of the calling function,
                                                            parameter (the place of the gradient that is reduced),
                                                            given_at (the call that gave the number to the function),
                                                            ratio_of (what the number was divided by), result_of
                                                            ("exp", "sqrt", "std", "var", or a function
                                                            of a library of metrics),
                                                            value (of one number), mean_of: {means, numbers, least,
                                                            most, unequal, weighted} where that number is the mean of
                                                            means that one line computed outside of training,
                                                            given (shape, where results are gathered), first (of
                                                            the rank's whole numbers), rows (of an
                                                            object: of a list of plain values; -1: another object)
    lined_up      rows that the script compares with others gathered_at, rows: in the order of ranks, after an
                  or takes a loss of                        evaluation of several batches; is_dealt (one of each
                                                            rank in turn)
    summed_again  the third all_reduce of one tensor, which elements, added (the script added to a sum)
                  held no less each time than the sum       once for each line
                  before
    save          torch.save, safetensors' save_file, DCP,  path (absolute), keys (top-level names, if a dict), how
                  and open(..., "w") by the script          ("torch.save", "safetensors", "dcp", "open", then also
                                                            mode), shards: [name, ...] of tensors that are shards
    load          torch.load and the like                   path, keys, saved_step (if the file has it)
    state         load_state_dict of a model, optimizer,    what ("model", "optimizer", "scheduler", "scaler"), id
                  scheduler, scaler                         missing, unexpected: [name, ...], of (number of names),
                                                            names_digest (of a model), model (of a watched one),
                                                            taken: [place, steps since] of the state_dict() that gave
                                                            the model's own tensors
    load_state    Accelerator.load_state                    objects (models, optimizers and objects that it loads into)
    stuck         no event and no collective for a while    stacks: {thread: [place, ...]}, collectives: [{group,
                                                            sequence, name, sizes, dtypes, state}] newest last (flight
                                                            recorder), blocked_in (name of the call the main thread is
                                                            in, if torch's), since_s, moves (the main thread runs
                                                            Python code; false: it is inside one call of C++)
    died          SIGTERM or SIGABRT ended the rank:        at, stacks and blocked_in of `stuck`, aborted (SIGABRT)
                  Python wrote its stacks, `read` makes
                  the event of them
    exit          the script ends                           code, error: {type, message, at, stack: [place, ...], the
                                                            innermost first}, last (collectives of `stuck`, after an
                                                            error), collectives: {group:
                                                            number of collectives made}, cut: {what: number} of events
                                                            that were left out, joined, backwards_left (passes after
                                                            the last optimizer step), steps: {optimizer: number},
                                                            parameters: {model: {name: digest}, when the process
                                                            group ended or at exit, if the model lived}, buffers (the
                                                            same, of those that no normalization has), outside: {key:
                                                            {files, made_from, digests}} of buffers of the script's
                                                            modules in no wrapper, copies: {number:
                                                            {class, at, digest, made_from, is_early (made before any
                                                            wrapping), changes (of its parameters), initial (names of
                                                            normalizations with the statistics of a new layer)}} of
                                                            modules with the names of a wrapped model
    note          an observer could not be installed        what, reason

A digest is a string of 16 hexadecimal characters: a position-weighted sum over the bits of a tensor modulo 2**64, equal
on all machines for equal bits, shapes and types.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank's events."""
    return folder / f"rank-{rank:05d}.jsonl"


class EventWriter:
    """Appends the events of this rank to its file, each with one system call."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.number, self.step = rank, 0, 0
        self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **keys: Any) -> None:
        """Append an event. Keys that are None are left out."""
        event = {"kind": kind, "rank": self.rank, "number": self.number, "time": time.time(), "step": self.step}
        event |= {key: value for key, value in keys.items() if value is not None}
        self.number += 1
        os.write(self._file, (_encode(event) + "\n").encode())

    def watch_signals(self) -> None:
        """Let a signal that ends the process write its stacks here: in C, so also while the process waits in C++."""
        if not faulthandler.is_enabled():
            faulthandler.enable(self._file)
        with contextlib.suppress(AttributeError):  # not on Windows
            faulthandler.register(signal.SIGTERM, self._file, chain=True)


def forget_signals() -> None:
    """A forked child of a rank is not a rank."""
    with contextlib.suppress(AttributeError):
        faulthandler.unregister(signal.SIGTERM)
    faulthandler.disable()


def read(folder: Path) -> list[Event]:
    """The events of all ranks, in the order of rank and number. A line that a kill cut off is left out."""
    found: list[Event] = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        own, rest = list[Event](), list[str]()
        for line in path.read_text(errors="replace").splitlines():
            try:
                own.append(json.loads(line))
            except json.JSONDecodeError:
                rest.append(line)
        found += own + _died(own, rest)
    return found


def _died(own: list[Event], rest: list[str]) -> list[Event]:
    """The event of a signal that ended a rank, from the stacks that Python wrote: the main thread comes last."""
    stacks: list[list[list[Any]]] = []
    for line in rest:
        if "most recent call first" in line:
            stacks.append([])
        elif stacks and (frame := _FRAME.fullmatch(line)):
            stacks[-1].append([frame[1], int(frame[2]), frame[3]])
    if not own or not stacks or own[-1]["kind"] == "exit":
        return []
    stack = [frame for frame in stacks[-1] if not frame[0].startswith(("<", _OWN))]
    files = {event["at"][0] for event in own if event.get("at")} | {event.get("script") for event in own}
    at = next((frame for frame in stack if frame[0] in files), None)
    told = {key: own[-1][key] for key in ("rank", "time", "step")} | {"number": own[-1]["number"] + 1}
    told |= {"kind": "died", "at": at, "stacks": {"MainThread": stack}, "blocked_in": blocked_in(stack, at)}
    return [told | {"aborted": any(line.startswith("Fatal Python error: Aborted") for line in rest)}]


def blocked_in(stack: list[list[Any]], at: list[Any] | None) -> str | None:
    """The outermost function of torch below a line of the user, in a stack that begins with the innermost."""
    inner = stack[: stack.index(at)] if at in stack else []
    named = [f"{os.path.splitext(file)[0].rpartition('-packages/')[2]}/{name}" for file, _, name in inner]
    outer = (name for name in reversed(named) if name.startswith("torch/") and "c10d_logger" not in name)
    return next((name.replace("/", ".") for name in outer), None)


class EventHistory:
    """The events of a run of a script, with the queries that rules need.

    Args:
        previous: an earlier run that this run resumes.
    """

    def __init__(self, events: Iterable[Event], previous: EventHistory | None = None) -> None:
        self.events, self.previous = list(events), previous
        self.ranks = sorted({event["rank"] for event in self.events})

    def of(self, *kinds: str, rank: int | None = None) -> Iterator[Event]:
        """Events of these kinds, of one rank or of all."""
        for event in self.events:
            if event["kind"] in kinds and rank in (None, event["rank"]):
                yield event

    def by_rank(self, *kinds: str) -> dict[int, list[Event]]:
        """Events of these kinds by rank; every rank is there."""
        return {rank: list(self.of(*kinds, rank=rank)) for rank in self.ranks}
