"""Choose the models for the options of a detection task."""

from __future__ import annotations

from pathlib import Path

from lockstep_recipes.tasks.vision.detection.models import DetectionModels
from lockstep_recipes.tasks.vision.detection.options import CENTER, DetectionOptions


def models_for(options: DetectionOptions, folder: Path | None) -> DetectionModels:
    """The object that makes the models for `options`.

    Args:
        folder: the folder in which an earlier start of the run saved the model's config. None: there is none.
    """
    if options.model is None and options.scratch.architecture == CENTER:
        from lockstep_recipes.tasks.vision.detection.center_models import CenterModels

        return CenterModels(options)
    from lockstep_recipes.tasks.vision.detection.transformers_models import TransformersDetectors

    return TransformersDetectors(options, folder)
