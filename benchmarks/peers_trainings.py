"""For `peers.py`: one training, written for five systems according to their documentation, with notes on what happened.

The job is a JSON object in the environment variable JOB; NOTES is the folder for notes. A rank appends a line for
each micro-batch (the samples in it) and for each step (its number, the time) to `NOTES/rank-R.jsonl`.

A sample is (index, x, y, units). The loss of a batch is the sum of units * squared error, divided by the sum of units:
units represent labels, tokens or pixels, and samples have unequal numbers of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

JOB = {
    "system": "plain",
    "samples": 200,
    "batch": 10,  # over all ranks, in a micro-batch
    "accumulate": 1,
    "epochs": 1,
    "width": 32,
    "save_every": 0,  # steps
    "lr": 0.1,
    "die_at": 0,  # the step after which the process ends abruptly
    "folder": "",  # for checkpoints
} | json.loads(os.environ.get("JOB", "{}"))
FEATURES = 16


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)
        self.units = torch.randint(1, 20, (count, 1), generator=generator).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index], self.units[index]


def network():
    torch.manual_seed(0)
    width = JOB["width"]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def sum_of_losses(model, batch):
    return (batch[3] * (model(batch[1]) - batch[2]).square()).sum()


def mean_loss(model, batch):
    return sum_of_losses(model, batch) / batch[3].sum()


def _note(**what):
    what |= {"at": time.time(), "processor": time.process_time(), "pid": os.getpid()}
    with open(Path(os.environ["NOTES"], f"rank-{os.environ.get('RANK', '0')}.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\n")


def note_batch(batch):
    _note(samples=[int(index) for index in batch[0]])


def note_step(step):
    """A step is done, and what the training does after a step, such as a save, may follow."""
    _note(step=step)
    if step == JOB["die_at"]:
        os._exit(1)


def keep(model):
    """The final weights, of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        torch.save(
            {name: tensor.clone() for name, tensor in model.state_dict().items()}, Path(os.environ["NOTES"], "end.pt")
        )


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def per_rank():
    return JOB["batch"] // world()


# ---- plain torch, as in its tutorials


def plain():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data, path = Samples(JOB["samples"]), Path(JOB["folder"], "state.pt")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=JOB["lr"])
    begun, step = 0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun, step = state["epoch"], state["step"]
    parallel = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, per_rank(), sampler=sampler)
    for epoch in range(begun, JOB["epochs"]):
        sampler.set_epoch(epoch)
        for place, batch in enumerate(loader, 1):
            note_batch(batch)
            (mean_loss(parallel, batch) / JOB["accumulate"]).backward()
            if place % JOB["accumulate"] and place < len(loader):
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            note_step(step)
            if JOB["save_every"] and step % JOB["save_every"] == 0:
                if dist.get_rank() == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"epoch": epoch, "step": step}, path)
                dist.barrier()
    keep(model)
    dist.destroy_process_group()


# ---- Accelerate


def accelerate():
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(JOB["folder"], automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=JOB["accumulate"], project_config=project)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=JOB["lr"])
    loader = DataLoader(Samples(JOB["samples"]), per_rank(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = -(-len(loader) // JOB["accumulate"])
    step, begun, skipped = 0, 0, 0
    saved = sorted(
        Path(JOB["folder"], "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1])
    )
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = (int(saved[-1].name.split("_")[1]) + 1) * JOB["save_every"]
        accelerator.project_configuration.iteration = int(saved[-1].name.split("_")[1]) + 1
        begun, skipped = divmod(step, updates)
    for epoch in range(begun, JOB["epochs"]):
        loader.set_epoch(epoch)
        first = epoch == begun and skipped
        for batch in skip_first_batches(loader, skipped * JOB["accumulate"]) if first else loader:
            with accelerator.accumulate(model):
                note_batch(batch)
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                note_step(step)
                if JOB["save_every"] and step % JOB["save_every"] == 0:
                    accelerator.save_state()
    accelerator.wait_for_everyone()
    keep(accelerator.unwrap_model(model))
    accelerator.end_training()


# ---- Lightning


def lightning():
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            note_batch(batch)
            return mean_loss(self.network, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=JOB["lr"])

    class Notes(Callback):
        last = 0

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step != self.last:
                self.last = trainer.global_step
                note_step(trainer.global_step)

        def on_train_start(self, trainer, _):
            self.last = trainer.global_step

    callbacks = [Notes()]
    if JOB["save_every"]:
        callbacks.append(ModelCheckpoint(JOB["folder"], every_n_train_steps=JOB["save_every"], save_last=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=JOB["epochs"],
        accumulate_grad_batches=JOB["accumulate"],
        callbacks=callbacks,
        enable_checkpointing=bool(JOB["save_every"]),
        default_root_dir=JOB["folder"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = DataLoader(Samples(JOB["samples"]), per_rank(), shuffle=True)
    trainer.fit(module, loader, ckpt_path="last" if JOB["save_every"] else None)
    keep(module.network)


# ---- transformers' Trainer


def trainer():
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    class Notes(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            note_step(state.global_step)

    class Regression(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            note_batch(inputs["batch"])
            return mean_loss(model, inputs["batch"])

    def collate(samples):
        return {"batch": torch.utils.data.default_collate(samples)}

    arguments = transformers.TrainingArguments(
        output_dir=JOB["folder"],
        num_train_epochs=JOB["epochs"],
        per_device_train_batch_size=per_rank(),
        gradient_accumulation_steps=JOB["accumulate"],
        optim="sgd",
        learning_rate=JOB["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="steps" if JOB["save_every"] else "no",
        save_steps=JOB["save_every"] or 500,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo",
        label_names=[],
    )
    model = network()
    data = Samples(JOB["samples"])
    training = Regression(model, arguments, data_collator=collate, train_dataset=data, callbacks=[Notes()])
    last = get_last_checkpoint(JOB["folder"]) if Path(JOB["folder"]).is_dir() else None
    training.train(resume_from_checkpoint=last)
    keep(model)


# ---- Lockstep: a task and a Part, for `lockstep train`


def _lockstep():
    import lockstep

    class Regression(lockstep.Task):
        """The same training as a task."""

        def model(self):
            return network()

        def train_data(self):
            return Samples(JOB["samples"])

        def weight(self, batch):
            return batch[3].sum()

        def loss(self, model, batch):
            if torch.is_grad_enabled():
                note_batch(batch)
            return sum_of_losses(model, batch)

    class Notes(lockstep.Part):
        """Notes steps."""

        def start(self, training):
            _note(start=training.step)  # earlier batches were tried before the first step

        def after_step(self, training):
            note_step(training.step)

        def end(self, training):
            keep(training.model)

    return Regression, Notes


if os.environ.get("JOB") and JOB["system"] == "lockstep":
    Regression, Notes = _lockstep()

if __name__ == "__main__":
    torch.set_num_threads(1)
    {"plain": plain, "accelerate": accelerate, "lightning": lightning, "trainer": trainer}[JOB["system"]]()
    sys.stdout.flush()
