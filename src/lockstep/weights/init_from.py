"""`train.init_from`: the initial weights of a new run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lockstep.core import run_folder
from lockstep.core.build import Beginning
from lockstep.core.checkpoint import choice
from lockstep.core.config.sections import TrainConfig
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.weights import first_weights, torch_file, torch_optimizer
from lockstep.weights.torch_file import TorchFile


class InitFrom(Beginning):
    """Weights of a different run, or of a safetensors or `torch.save` file, which may contain a state of the
    optimizer."""

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        self.file: TorchFile | None = None

    def load_weights(self, model: nn.Module, world: World) -> list[str]:
        train = self.train
        source = Path(train.init_from or "").expanduser()
        folder = source / "checkpoints"
        if not folder.is_dir():
            if train.init_checkpoint is not None:
                raise UsageError(
                    f"{source} is not the directory of a run",
                    where="train.init_checkpoint",
                    remedy="remove it, or set train.init_from to a run directory",
                )
            self.file = file = torch_file.read(source) if torch_file.is_torch_file(source) else None
            left = first_weights.load_weights(model, source, train.init_skip, torch_file=file)
            place = f"the weights are from {file.place}" if file is not None else ""
            stay = f"these keep the values of Task.model: {', '.join(left)}" if left else ""
            return [f"train.init_from={train.init_from}: {text}" for text in (place, stay) if text]
        retention = run_folder.retention_of(source)
        lines = choice.read(
            folder,
            world,
            retention,
            train.init_checkpoint,
            load=lambda checkpoint: first_weights.load_weights(model, source, train.init_skip, checkpoint),
            where="train.init_checkpoint",
        )
        return [f"train.init_from={train.init_from}: {line}" for line in lines]

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> list[str]:
        train, file, self.file = self.train, self.file, None
        if file is None:
            return []
        kind, texts = type(optimizer).__name__, []
        if file.optimizer is not None:
            try:
                if train.init_skip:
                    raise torch_optimizer.NotTaken("train.init_skip excludes some of its weights")
                count = torch_optimizer.load(file.optimizer, model, optimizer, saved_class=file.optimizer_class)
                texts.append(
                    f"the state of {kind} is loaded for {number_of(count, 'parameter')}; its settings come from "
                    "the config"
                )
            except torch_optimizer.NotTaken as error:
                texts.append(f"the optimizer's state is not loaded: {error}")
        if file.scaler is not None:
            taken = precision.load_foreign(file.scaler)
            texts.append(
                f"the loss scale is {'' if taken else 'not '}loaded" + f" (precision={precision.name})" * (not taken)
            )
        texts.append("the new run starts at step 0")
        if file.others:
            texts.append(f"not loaded: {', '.join(file.others)}")
        return [f"train.init_from={train.init_from}: {'; '.join(texts)}"]
