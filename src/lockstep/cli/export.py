"""`lockstep export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Checkpoint, Debug, Force, RunDir
from lockstep.cli.reporting import reporting, tell_first
from lockstep.core.user_files import check_replaceable
from lockstep.lora import exported


def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder; with --optimizer a new file.")],
    force: Force = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Write one file for torch.load, with the optimizer's state.")
    ] = False,
    program: Annotated[
        bool,
        typer.Option("--program/--no-program", help="Write model.pt2, which torch runs without the model's code."),
    ] = True,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write weights with merged adapters (task.lora), not only the adapters.")
    ] = False,
    hub_name: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Upload OUT to the Hugging Face hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository on the hub private.")] = False,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Write a trained model for use without Lockstep. With --optimizer: the state of its training.

    OUT gets model.safetensors (the weights); model.pt2 (the model as a program for torch.export.load) and model.json
    (its inputs); for images and CT volumes use_model.py, which predicts files; for models of transformers config.json
    and what its pipelines read; the labels and the preparation of inputs; of a task in FILE.py its source.
    """
    with reporting(debug):
        from lockstep.configs import config_file

        settings = config_file.with_kept_task(config_file.read_run(run_dir), run_dir, tell_first)
        from lockstep.trainer import hub
        from lockstep.trainer.export import check_free
        from lockstep.trainer.trainer import Trainer

        hub.check(hub_name, str(settings.task.get("kind", "")), private=private, optimizer=optimizer)
        if optimizer:
            if out.exists():
                check_replaceable(out, force=force)
        else:
            check_free(out, force=force)
        trainer = Trainer(settings, run_dir=run_dir, checkpoint=checkpoint)
        if optimizer:
            print(trainer.export_training_state(out, force=force))
            return
        print(trainer.export(out, program=program, merge=merge, force=force), flush=True)
        if hub_name is not None:
            print(hub.push(out, hub_name, private=private), flush=True)
        print(f"next, in Python: {next_step(out)}", file=sys.stderr)


def next_step(folder: Path) -> str:
    """A line of Python that uses an export.

    Args:
        folder: of the export.
    """
    place, has = str(folder), {path.name for path in folder.iterdir()}
    if "use_model.py" in has:
        inputs = "VOLUME.npz" if "volume_risk.json" in has else "IMAGE.jpg"
        return f"import runpy; print(runpy.run_path({str(folder / 'use_model.py')!r})['predict']({inputs!r}))"
    if "generation_config.json" in has:  # the model card says how prompts look, and what adapters need
        code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
        return "; ".join(line.replace('"FOLDER"', repr(place)) for line in code.splitlines() if line)
    if "adapter_config.json" in has:
        return exported.loading(folder)
    if "tokenizer_config.json" in has:
        given = f"'text-classification', model={place!r}{', trust_remote_code=True' * ('embedding_bag.py' in has)}"
        return f"from transformers import pipeline; print(pipeline({given})('a text'))"
    if "model.pt2" in has:
        loading = f"torch.export.load({str(folder / 'model.pt2')!r}).module()"
        return f"import torch; program = {loading}  # program(batch=...): see model.json"
    weights = str(folder / "model.safetensors")
    return f"from safetensors.torch import load_file; weights = load_file({weights!r})"
