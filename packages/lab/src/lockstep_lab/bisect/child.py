"""Trains a run again in its own process, and writes its trace: `python -m lockstep_lab.bisect.child ORDER.json`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import json
import pickle
import sys
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.configs import config_file
from lockstep.core import this_process
from lockstep.core.build import Run
from lockstep.core.built_in import Inside
from lockstep.core.data import difference
from lockstep.core.data.dataset import name_of
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.loader import MicroBatch, MicroBatches
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import restored, restored_generators
from lockstep.core.errors import LockstepError, described
from lockstep.core.parallel import sharded_tensor
from lockstep.core.parallel.equal_bits import kind
from lockstep.core.parallel.gradients import grad_norm
from lockstep.core.part import Training
from lockstep.core.plugins import package_of
from lockstep.parts import replicas
from lockstep.parts.digest import digests, fold
from lockstep.parts.operations import Results, caller, place_of
from lockstep.trainer import run_directory, source_code
from lockstep.trainer.joining import Recorder
from lockstep.trainer.trainer import Trainer
from lockstep_lab.bisect.trace import Operation, StepTrace, TensorDigest, Trace

_ENGINE = str(Path(config_file.__file__).parents[1])
_SETTINGS = ("lr", "weight_decay", "betas", "momentum", "eps", "name")


class _Enough(BaseException):
    """The wanted steps are made."""


class TraceRecorder(Recorder):
    """Records the trace of a training on this rank.

    Args:
        until: the last step.
        detailed: the steps with samples and operations.
    """

    def __init__(self, until: int, detailed: set[int]) -> None:
        self.until, self.detailed, self.trace = until, detailed, Trace()
        self._operations = contextlib.ExitStack()
        self._step = StepTrace(0)
        self._is_evaluating = self._is_hooked = False

    # ---- called by the trainer

    def join(self, run: Run) -> None:
        self.run = run
        self.trace.fingerprint = run.fingerprint

    def record(self, entry: Mapping[str, float]) -> None:
        self.trace.entries.append(dict(entry))
        if results := {name: repr(value) for name, value in entry.items() if name.startswith("eval/")}:
            self._step.stages["results"] = results

    @contextlib.contextmanager
    def apart(self, what: str) -> Generator[None, None, None]:
        self._is_evaluating = what == "evaluation"
        try:
            yield
        finally:
            self._is_evaluating = False

    def start(self, training: Training) -> None:
        state = self.run.state
        self.trace.setup = {
            "default dtype": str(torch.get_default_dtype()),
            "device": kind(state.world.device),
            "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
            "precision of float32 products": torch.get_float32_matmul_precision(),
        }
        state.strategy.unwrapped.register_forward_pre_hook(self._begin_forward)
        state.strategy.unwrapped.register_forward_hook(self._see_losses)
        for name, leaf in state.strategy.leaves().items():
            leaf.register_hook(partial(self._see_gradient, name))  # type: ignore[no-untyped-call]
        self.run.model.register_forward_hook(self._see_output)
        original = MicroBatches.__getitem__

        def read(batches: MicroBatches, plan: Any) -> MicroBatch:
            found = original(batches, plan)
            if self._is_evaluating:
                seen = self._step.stages.setdefault("evaluated", {})
                seen[found.indices] = difference.record(found.collated)
            return found

        MicroBatches.__getitem__ = read  # type: ignore[method-assign]

    def before_step(self, training: Training) -> None:
        assert isinstance(training, Inside)
        state = self.run.state
        if state.step >= self.until:
            raise _Enough
        if not self._is_hooked:  # after the Parts of the user, which may change gradients
            self._is_hooked = True
            state.optimizer.register_step_pre_hook(lambda *_: self._see_update())
        self._step = step = StepTrace(state.step + 1, detailed=state.step + 1 in self.detailed)
        self.trace.steps.append(step)
        batches = [one for one in training.micro_batches if not one.filler]
        stages = step.stages
        stages["order"] = [(one.epoch, index) for one in batches for index in one.indices]
        stages["split"] = [len(one.indices) for one in training.micro_batches]
        self._read_samples(batches, stages, detailed=step.detailed)
        stages["batch"] = {
            f"micro-batch {number}": [*difference.record(one.collated), *difference.record({"weight": one.weights})]
            for number, one in enumerate(training.micro_batches)
        }
        tensors = replicas.tensors_of_state(state)
        stages["weights"] = _digests({n: t for n, t in tensors.items() if not n.startswith("optimizer.")})
        stages["optimizer"] = _digests({n: t for n, t in tensors.items() if n.startswith("optimizer.")})
        stages |= {"loss": {}, "gradient": {}}
        if step.detailed:
            place = partial(_place, (_ENGINE, str(Path(__file__).parent)))
            self._results = self._operations.enter_context(Results(place))
            stages |= {"forward": [], "backward": []}

    def after_step(self, training: Training) -> None:
        self._operations.close()
        self._step.stages["update"] = _digests(replicas.tensors_of_state(self.run.state))

    # ---- hooks

    def _take_operations(self, stage: str) -> None:
        """The operations since the last call belong to a stage."""
        if self._step.detailed and not self._is_evaluating:
            found, self._results.found = self._results.found, []
            self._step.stages[stage] += [
                Operation(name, TensorDigest(numbers), place) for name, place, numbers in found
            ]

    def _begin_forward(self, *_: Any) -> None:
        self._take_operations("backward")  # of the micro-batch before

    def _see_losses(self, _: Any, __: Any, losses: Any) -> None:
        seen = self._step.stages.get("loss")
        if seen is not None and isinstance(losses, dict) and not self._is_evaluating:
            number = len(seen) // len(losses) if losses else 0
            seen |= {f"{head} of micro-batch {number}": float(value.detach()) for head, value in losses.items()}
            self._take_operations("forward")

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        seen = self._step.stages.get("gradient")
        if seen is not None:
            about = str(gradient.dtype), tuple(gradient.shape)
            seen.setdefault(name, []).append(TensorDigest((*about, *fold({name: gradient}).tolist())))

    def _see_update(self) -> None:
        self._take_operations("backward")
        state, stages = self.run.state, self._step.stages
        weights = _digests({f"model.{name}": p for name, p in self.run.model.named_parameters()})
        stages["moved"] = {n: d for n, d in weights.items() if d != stages["weights"].get(n, d)}
        stages["exchange"] = {"norm": float(grad_norm(state.parameters))}
        grads = {name: p.grad for name, p in self.run.model.named_parameters() if p.grad is not None}
        stages["exchange"] |= _digests(grads)
        stages["settings"] = {"optimizer": type(state.optimizer).__name__, "clip_norm": state.clip_norm} | {
            f"{key} of {group.get('name', number)}": group[key]
            for number, group in enumerate(state.optimizer.param_groups)
            for key in _SETTINGS
            if key in group
        }

    def _see_output(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._is_evaluating:
            self._step.stages.setdefault("outputs", []).append(TensorDigest((digest_of(output),)))

    # ---- samples

    def _read_samples(self, batches: list[MicroBatch], stages: dict[str, Any], *, detailed: bool) -> None:
        source = self.run.batches.loader.micro_batches
        words = {
            (one.epoch, index): word for one in batches for index, word in zip(one.indices, one.words, strict=True)
        }
        if source.stream is None:
            self._step.names = {key: name_of(source.data, key[1]) for key in words}
        root = f"{self.run.config.data.train or ''}/"
        stages["file"] = {key: name.removeprefix(root) for key, name in self._step.names.items()}
        if not detailed or source.stream is not None:
            return
        found: dict[str, dict[Any, Any]] = {"bytes": {}, "decoded": {}, "prepared": {}}
        private = [one.generator for one in source.seeding.private if one.generator is not None]
        with restored_generators(self.run.world.device), restored(private), contextlib.suppress(LockstepError):
            for (epoch, index), word in words.items():
                path = Path(self._step.names[epoch, index])
                if path.is_file():
                    found["bytes"][epoch, index] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                source.seeding.seed_all(derive_seed(word, state=derive_seed(source.seed, epoch)))
                raw = source.data[index]
                found["decoded"][epoch, index] = difference.record(raw)
                if source.prepares:
                    raw = source.task.prepare(raw, epoch, source.training)
                    found["prepared"][epoch, index] = difference.record(raw)
        stages |= found


def _digests(tensors: Mapping[str, Any]) -> dict[str, TensorDigest]:
    local = {name: sharded_tensor.local(tensor.detach()) for name, tensor in tensors.items()}
    found = digests(local)
    return {n: TensorDigest((str(t.dtype), tuple(t.shape), *found[n])) for n, t in local.items()}


def _place(folders: tuple[str, ...]) -> str:
    return place_of(caller(folders))


def use_kept_code(run_dir: Path, kind_of_task: str) -> None:
    """From now on, Python imports the files of the task as the run has kept them, under their own paths."""
    path, is_file, _ = kind_of_task.rpartition(".py:")
    if not is_file:
        return
    root = package_of(Path(f"{path}.py").resolve())[1]
    texts = {str(root / name): text for name, text in source_code.read(run_dir / "source").items()}
    loader: Any = importlib.machinery.SourceFileLoader
    get_data, path_stats = loader.get_data, loader.path_stats

    def stats(self: Any, file: str) -> Any:
        if file in texts:
            raise OSError("its compiled code may be of a different text")
        return path_stats(self, file)

    loader.path_stats = stats
    loader.get_data = lambda self, file: texts[file].encode() if file in texts else get_data(self, file)


def main(order: Mapping[str, Any]) -> None:
    """Train a run again, up to a step, and write the trace of this rank."""
    run_dir, scratch = Path(order["run_dir"]), Path(order["scratch"])
    config = config_file.read_run(run_dir)
    use_kept_code(run_dir, str(config.task.get("kind", "")))
    config = config_file.with_kept_task(config, run_dir, lambda text: None)
    values = config.model_dump(by_alias=True)
    values["log"] |= {"writers": [], "flops": False, "model_summary": False, "pictures": 0}
    values["data"]["workers"] = values["watch"]["every"] = 0
    values["checkpoint"] |= {"every_steps": 0, "every_minutes": None}
    recorder = TraceRecorder(order["until"], set(order["detailed"]))
    try:
        Trainer(config_file.parse(values, needs_task=False), run_dir=scratch, quiet=True).fit(recorder=recorder)
    except _Enough:
        pass
    except Exception as error:
        recorder.trace.error = str(error) if isinstance(error, LockstepError) else described(error)
    recorder.trace.libraries = run_directory.libraries()
    with Path(order["out"], f"rank{this_process.rank()}.pickle").open("wb") as file:
        pickle.dump(recorder.trace, file)
    if recorder.trace.error:
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
