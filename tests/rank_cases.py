"""What tests run on ranks, beyond plain training: importable functions that return plain values."""

import contextlib
import os
from pathlib import Path

import torch

from lockstep import LockstepError, Trainer
from lockstep.core.parallel import failure
from lockstep.core.parallel.ddp import DDP
from lockstep.core.parallel.strategy import Forward
from tests import own_tasks, runs


def count_reductions(settings):
    """The bucket index of every gradient reduction of a training, as DDP's own communication hook sees them."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    calls = []
    wrap = DDP.wrap

    def counting_wrap(strategy, *arguments):
        wrap(strategy, *arguments)
        strategy.forward.register_comm_hook(
            None, lambda state, bucket: (calls.append(bucket.index()), allreduce_hook(state, bucket))[1]
        )

    DDP.wrap = counting_wrap
    try:
        runs.fit_kind("Masked", {}, settings)
    finally:
        DDP.wrap = wrap
    return calls


def digest_of_everything(kind, options, settings):
    """All parameters, buffers and optimizer tensors after training, as bytes."""
    import lockstep.core.run_model

    kept = {}
    build = lockstep.core.run_model.build_optimizer

    def keeping(*arguments, **optionals):
        kept["optimizer"] = build(*arguments, **optionals)
        return kept["optimizer"]

    lockstep.core.run_model.build_optimizer = keeping
    try:
        weights, _ = runs.fit_kind(kind, options, settings)
    finally:
        lockstep.core.run_model.build_optimizer = build
    slots = [
        value
        for state in kept["optimizer"].state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [tensor.numpy().tobytes() for tensor in [*weights.values(), *slots]]


@contextlib.contextmanager
def impatient():
    """Ranks look for errors of other ranks more often than once a second, and wait less long for the other ranks."""
    usual, failure._POLL_S = failure._POLL_S, 0.4
    try:
        yield
    finally:
        failure._POLL_S = usual


@impatient()
def error_of(kind, options, settings, run_dir=None):
    """The error that training ends with on this rank."""
    try:
        runs.fit_kind(kind, options, settings, run_dir)
    except LockstepError as error:
        return str(error)
    return None


def evaluate_and_predict(lengths, micro):
    """Evaluation results, predictions and, on rank 0, the table and the samples to show of an untrained model.

    For data sets of several lengths.

    Samples have made-up lengths, which cut the evaluation otherwise, and change no result.
    """
    from lockstep.core.data.loader import Loader, MicroBatches
    from lockstep.core.data.order import EvaluationPlan
    from lockstep.core.evaluate import evaluate, predict
    from lockstep.core.parallel.precision import Precision
    from lockstep.core.parallel.world import join_world

    answers = []
    with join_world("cpu") as world:
        for length in lengths:
            task = own_tasks.Classes(eval_length=length)
            torch.manual_seed(0)
            model = task.model()
            loader = Loader(MicroBatches(task.eval_data(), task, 0, training=False), 0, world.device)
            arguments = (task, Forward(model, task.loss), loader)
            options = {"world": world, "precision": Precision("fp32", world.device)}
            by_length = EvaluationPlan(length, micro, torch.arange(length).remainder(7).numpy())
            outputs = predict(*arguments, plan=by_length, **options)
            shown = []

            def show(values, samples, shown=shown):
                shown += [values["confusion"].tolist(), [(index, output.tolist()) for index, output in samples]]

            plan = EvaluationPlan(length, micro)
            results = evaluate(*arguments, plan=plan, show=show, show_samples=plan.first(4), **options)
            answers.append((results, None if outputs is None else [output.tolist() for output in outputs], shown))
    return answers


def predict_each_of_files(length, broken, micro):
    """(index, None) of each sample in the order in which outputs come, or (index, the reason) if it cannot be read."""
    from lockstep.core.data.loader import Loader, MicroBatches
    from lockstep.core.data.order import EvaluationPlan
    from lockstep.core.evaluate import Unreadable, predict_each
    from lockstep.core.parallel.precision import Precision
    from lockstep.core.parallel.world import join_world

    class Predicting(own_tasks.FromFiles):
        def predict(self, model, batch):
            return batch[0]

    task = Predicting(length, broken)
    with join_world("cpu") as world:
        micro_batches = MicroBatches(task.files, task, 0, training=False, on_error="skip")
        each = predict_each(
            task,
            Forward(task.model(), task.loss),
            Loader(micro_batches, 0, world.device),
            plan=EvaluationPlan(length, micro),
            world=world,
            precision=Precision("fp32", world.device),
        )
        answers = []
        for index, output in each:
            is_bad = isinstance(output, Unreadable)
            assert is_bad or torch.equal(output, task.files[index][0])
            answers.append((index, output.what if is_bad else None))
        return answers


def evaluate_run(run_dir, kind, options, strategy="ddp"):
    return Trainer(runs.config(parallel={"strategy": strategy}), run_dir=Path(run_dir), quiet=True).evaluate(
        getattr(own_tasks, kind)(**options)
    )


def batchnorm_buffers(settings, run_dir):
    """Buffers on this rank at evaluation: BatchNorm saw other samples on each rank."""
    seen = []

    class Normed(own_tasks.Plain):
        def model(self):
            self.built = torch.nn.Sequential(
                torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5)
            ).double()
            return self.built

        def loss(self, model, batch):
            if not model.training and model[1].num_batches_tracked:  # not in the dry run before the first step
                seen.append([buffer.tolist() for buffer in model.buffers()])
            return super().loss(model, batch)

    runs.fit(Normed(eval_length=4), settings, run_dir)
    return seen


def ledger(run_dir, settings, options):
    """Indices of the samples that this rank trained on, step by step."""
    from lockstep.core import build

    steps = []
    original = build.train_step

    def noting(run, micros, samples, want_norm=False):
        steps.append((run.step, [index for micro in micros if not micro.filler for index in micro.indices]))
        return original(run, micros, samples, want_norm=want_norm)

    build.train_step = noting
    try:
        runs.fit_kind("Plain", options, settings, run_dir)
    finally:
        build.train_step = original
    return steps, os.getpid()


def evaluate_and_predict_quietly(lengths, micro):
    """Without torchmetrics' warnings about classes that no sample has."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate_and_predict(lengths, micro)


def fit_saved(kind, settings, run_dir):
    """Train a task for which only what it saves counts."""
    options = {"dtype": torch.float32} if kind == "Single" else {}
    runs.fit_kind("Masked" if kind == "Single" else kind, options, settings, run_dir)


@impatient()
def fit_in_a_folder_of_its_own(settings, folder):
    """What a user does whose ranks have different working directories: the error that this rank ends with."""
    try:
        runs.fit_kind("Plain", {}, settings, Path(folder) / os.environ["RANK"])
    except LockstepError as error:
        return str(error)
    return None


def export_and_evaluate(run_dir, settings, options, out):
    """What users of the Python interface do on ranks, with a run that another strategy may have trained."""
    trainer = Trainer(settings, run_dir=Path(run_dir), quiet=True)
    trainer.export(out, own_tasks.Deep(**options))
    outputs = trainer.predict(own_tasks.Deep(**options))
    assert (not outputs) == (os.environ["RANK"] != "0")
    return trainer.evaluate(own_tasks.Deep(**options))


def fit_quietly(kind, options, settings, run_dir):
    """Without what torch.compile warns of while it looks at tensors."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runs.fit_kind(kind, options, settings, run_dir)


def fit_from_file(settings):
    """Weights after training, and how many rows of each tensor this rank has read from the file."""
    from lockstep.weights import first_weights

    opened, read = first_weights._open, {}

    class Slices:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner

        def __getattr__(self, attribute):
            return getattr(self.inner, attribute)

        def __getitem__(self, rows):
            part = self.inner[rows]
            read[self.name] = len(part)
            return part

    class File:
        def __init__(self, inner):
            self.keys, self.get_tensor = inner.keys, inner.get_tensor
            self.get_slice = lambda name: Slices(name, inner.get_slice(name))

    first_weights._open = lambda *arguments: File(opened(*arguments))
    try:
        weights, _ = runs.fit_kind("Deep", {}, settings)
    finally:
        first_weights._open = opened
    return weights, read


def fit_out_of_memory(settings, run_dir, place, least=12):
    """Weights after a training in which micro-batches of `least` or more samples do not fit; or the error's name, text
    and whether the launcher starts the ranks again.

    Args:
        place: number of the pass from 1 (None: all passes), kind of the pass.
    """
    from lockstep.core.data.device_copies import DeviceCopies

    when, where = place
    passes = [0]

    def fail(inputs):
        if len(inputs) < least:
            return
        passes[0] += 1
        if when in (None, passes[0]):
            shortage()

    class Large(own_tasks.Deep):
        def loss(self, model, batch):
            if where == "forward" and torch.is_grad_enabled():
                fail(batch[0])
            loss = super().loss(model, batch)
            if where == "backward" and torch.is_grad_enabled():
                loss.register_hook(lambda grad: fail(batch[0]))
            return loss

    make, copy = DeviceCopies.__init__, DeviceCopies.begin

    def make_as_for_a_device(copies, *arguments, **options):  # a CPU needs no copies
        make(copies, *arguments, **options)
        copies.changes_nothing = False

    def fail_to_copy(copies, batch):
        if where == "copy":
            fail(batch[0])
        return copy(copies, batch)

    DeviceCopies.__init__, DeviceCopies.begin = make_as_for_a_device, fail_to_copy
    try:
        with impatient():
            return runs.fit(Large(), settings, Path(run_dir))[0]
    except LockstepError as error:
        return type(error).__name__, str(error), error.retryable
    finally:
        DeviceCopies.__init__, DeviceCopies.begin = make, copy


def dtypes_seen(settings):
    """Weights, results, and the number formats in the loss: of a gathered parameter, an activation and a target."""
    seen = set()

    class Looking(own_tasks.Deep):
        def loss(self, model, batch):
            if torch.is_grad_enabled():
                seen.add((str(model.head.weight.dtype), str(model.head(torch.zeros(1, 7)).dtype), str(batch[1].dtype)))
            return super().loss(model, batch)

    weights, results = runs.fit(Looking(dtype=torch.float32), settings)
    return weights, results, seen


def overflow_of_one_row(settings, run_dir):
    """Weights before a training in whose first step the gradient of one row is too large for any loss scale."""

    class OneRow(own_tasks.Deep):
        steps = 0

        def loss(self, model, batch):
            self.steps += model.training
            return super().loss(model, batch) + model.head.weight[4].sum() * (1e36 if self.steps == 1 else 0)

    task = OneRow(dtype=torch.float32)
    torch.manual_seed(0)
    before = {name: tensor.clone() for name, tensor in task.model().state_dict().items()}
    runs.fit(task, settings, run_dir)
    return before


def command(*arguments):
    """What the command line prints on this rank, which torchrun might have started."""
    from typer.testing import CliRunner

    from lockstep.cli.application import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def refusal(*arguments):
    """What the command line says on this rank of something that it refuses."""
    from typer.testing import CliRunner

    from lockstep.cli.application import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code
    return done.stderr


def refusal_with_other_files(run_dir, folder):
    """Predict where each rank finds other files in the same folder."""
    files = sorted(Path(folder).iterdir())[: 1 + int(os.environ["RANK"])]
    return refusal("predict", run_dir, *files)


def shortage(text="CUDA error: out of memory"):
    raise torch.AcceleratorError(text)


@impatient()
def update_out_of_memory(settings, run_dir, rank, step, where):
    """Weights of a training in which the update of `step` does not fit on `rank`; or class and text of its error, and
    whether another start may go well."""
    from lockstep.core.ema import Ema
    from lockstep.core.parallel.precision import Precision

    owner, name = {"optimizer": (Precision, "step"), "averages": (Ema, "update")}[where]
    original, calls = getattr(owner, name), [0]

    def fail(*arguments):
        calls[0] += 1
        if calls[0] == step and rank in (None, int(os.environ["RANK"])):
            shortage("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return original(*arguments)

    setattr(owner, name, fail)
    try:
        return runs.fit(own_tasks.Deep(), settings, Path(run_dir))[0]
    except LockstepError as error:
        return type(error).__name__, str(error), error.retryable
    finally:
        setattr(owner, name, original)


@impatient()
def evaluation_out_of_memory(settings, run_dir, least):
    """Results of a training in which an evaluation of `least` or more samples does not fit; or the error."""

    class Large(own_tasks.Deep):
        steps = 0

        def loss(self, model, batch):
            self.steps += model.training and torch.is_grad_enabled()
            if len(batch[0]) >= least and not model.training and self.steps:  # not in the dry run
                shortage()
            return super().loss(model, batch)

    try:
        return runs.fit(Large(eval_length=24), settings, Path(run_dir))[1]
    except LockstepError as error:
        return type(error).__name__, str(error), error.retryable


def variables_of_ranks():
    from lockstep.core.parallel.world import join_world
    from lockstep.launch.preflight import variables

    with join_world("cpu") as world:
        return variables.of_ranks(world)
