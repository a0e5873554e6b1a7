"""The units of a mean are found also in a new model, whose losses are nearly equal."""

import pytest
import torch
from torch.nn import functional

from lockstep_recipes.adapters import units

WORDS = 2000


def new_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 32), torch.nn.Linear(32, WORDS, bias=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def batch():
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (16, 60), generator=draw)
    lengths = torch.randint(20, 60, (16, 1), generator=draw)
    mask = torch.arange(60)[None] < lengths
    return {"words": words, "labels": words.where(mask, -100), "mask": mask.long()}


def of_labels(model, batch):
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def of_shifted(model, batch):
    return functional.cross_entropy(model(batch["words"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def of_samples(model, batch):
    losses = functional.cross_entropy(model(batch["words"]).transpose(1, 2), batch["words"], reduction="none")
    return ((losses * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


@pytest.mark.cases("of_shifted")
@pytest.mark.parametrize(("loss", "kind"), [(of_labels, "labels"), (of_shifted, "shifted"), (of_samples, "samples")])
def test_the_units_of_a_new_model_are_found(loss, kind):
    model, fits, count = new_model(), units.Fits(), 0
    whole = units.Given(batch(), 16, "train")

    def measured(given):
        return given, {"": float(loss(model, given.batch))}

    with torch.no_grad():
        before = [parameter.clone() for parameter in model.parameters()]
        for factor in units.SCALES:
            with units.scaled(model, factor):
                parts = [
                    (measured(units.sliced(whole, 0, cut)), measured(units.sliced(whole, cut, 16))) for cut in (1, 8)
                ]
                trial = units.HalvesTrial(measured(whole), parts)
            fits.add(trial, near=64 * torch.finfo(torch.float32).eps)
            count += 1
            if not fits.is_open("", trial):
                break
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not fits.is_open("", trial), "it is settled"
    assert count > 1, "the first trial fits several units"
    # The labels that are there and the ones of the mask are equally many.
    assert fits.unit("").kind == kind
