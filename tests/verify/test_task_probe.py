"""What makes a training depend on how it is run, found in a forward and a backward pass."""

from pathlib import Path

import pytest
import torch

from lockstep.verify.task_probe import TaskProbe, look
from tests import runs

HERE = Path(__file__).resolve().parent
RIGHT, ODD = HERE / "clean_tasks.py", HERE / "odd_tasks.py"


def nature(name, file=ODD, part=29, **sections):
    return look(runs.config(task={"kind": f"{file}:{name}"}, **sections), part)


def test_a_plain_task_has_nothing_to_say():
    found = nature("Base", RIGHT)
    assert (found.random, found.still_random, found.dropouts, found.norms, found.unfixable) == ([], [], 0, 0, 0)
    assert found.double
    assert found.epsilon == torch.finfo(torch.float64).eps
    assert found.coupling < 1e-12
    assert (found.means, found.mixed) == ([], [])
    assert (found.notes(), found.obstacle(), found.diagnosis()) == ([], None, "")


def test_dropout_is_found_in_all_its_forms_and_silenced():
    found = nature("Dropout", RIGHT)
    assert set(found.random) == {"bernoulli_", "rand"} or {"native_dropout", "rand"} <= set(found.random)
    assert found.still_random == []
    assert found.dropouts == 2  # the module's and the attribute; the function has none
    assert found.coupling < 1e-12
    assert found.notes() == ["dropout is off for this comparison: it draws other numbers on another number of ranks"]
    assert found.obstacle() is None


@pytest.mark.parametrize(("name", "dropouts"), [("Attention", 4), ("Recurrent", 1)])
def test_dropout_in_attention_and_between_recurrent_layers_is_found_and_silenced(name, dropouts):
    found = nature(name, RIGHT)
    assert found.random
    assert found.still_random == []
    assert found.dropouts == dropouts
    assert found.coupling < 1e-12


def test_other_random_operations_are_named_and_an_obstacle():
    found = nature("Noisy")
    assert found.random == found.still_random == ["randn_like", "bernoulli"]
    assert found.notes() == []
    assert "randn_like, bernoulli" in found.obstacle()


def test_random_numbers_in_evaluation_mode_are_told_from_those_of_training():
    found = nature("Dropout", RIGHT)
    assert (found.evaluating, found.predicting) == ([], [])
    assert nature("Noisy").evaluating == ["randn_like", "bernoulli"]
    found = nature("SampledPredictions")
    assert (found.random, found.evaluating, found.predicting) == ([], [], ["multinomial"])


def test_pythons_and_numpys_random_numbers_are_found():
    assert nature("PythonsRandom").still_random == ["Python's random"]
    found = nature("NumpysRandom")
    assert found.still_random == ["numpy.random"]
    assert "numpy.random" in found.obstacle()


def test_random_numbers_of_preparation_are_none_of_the_models():
    found = nature("Augmented", RIGHT)
    assert (found.random, found.still_random) == ([], [])


@pytest.mark.parametrize(("name", "generator"), [("MixedByNumpy", "numpy.random"), ("MixedByTorch", "torch")])
def test_random_numbers_of_collate_are_found_and_an_obstacle(name, generator):
    found = nature(name)
    assert found.mixed == [generator]
    assert found.random == []
    assert found.obstacle() == f"Task.collate draws random numbers ({generator}), by design others for each micro-batch"
    found = nature("Augmented", RIGHT)
    assert (found.mixed, found.obstacle()) == ([], None)


def test_attention_without_dropout_is_not_random():
    found = nature("Attention")
    assert (found.random, found.still_random, found.dropouts) == ([], [], 0)
    assert found.obstacle() is None


def test_a_mean_instead_of_a_sum_is_found():
    found = nature("Mean")
    assert found.means == ["loss"]
    assert found.coupling == pytest.approx(0.5)
    assert "returns a mean where a SUM over its units is asked for (reduction='sum'): off by" in found.diagnosis()
    found = nature("MeanOfHeads")
    assert found.means == ["a", "b"]
    assert "(reduction='sum') for 'a', 'b'" in found.diagnosis()


@pytest.mark.parametrize(
    ("name", "heads"),
    [("Odd", ["loss"]), ("MaskedMean", ["loss"]), ("MeanOfOneHead", ["a"]), ("MeanOverSamples", ["b"])],
)
def test_a_mean_is_found_whatever_the_halves_weigh(name, heads):
    """Over valid labels, of which the halves have unevenly many; over samples; or in a small head beside a large one that is a sum."""
    found = nature(name)
    assert found.means == heads
    assert "returns a mean where a SUM" in found.diagnosis()


def test_samples_that_influence_each_other_are_found():
    found = nature("Coupled")
    assert found.coupling > 1e-3
    assert not found.means
    assert "samples influence each other" in found.diagnosis()


def test_weights_by_head_and_masks_are_no_coupling():
    found = nature("Horizons", RIGHT)
    assert found.coupling < 1e-6
    assert found.diagnosis() == ""


def test_a_single_sample_has_no_halves():
    found = nature("Single", part=5)
    assert (found.coupling, found.means) == (0.0, [])


def test_batch_norm_is_counted_and_no_coupling_once_it_is_fixed():
    found = nature("Normed")
    assert (found.norms, found.unfixable, found.dropouts) == (2, 0, 1)
    assert found.coupling < 1e-12
    assert found.obstacle() is None
    assert any(note.startswith("2 BatchNorm modules keep fixed statistics") for note in found.notes())


def test_batch_norm_without_statistics_is_an_obstacle():
    found = nature("Unfixable")
    assert (found.norms, found.unfixable) == (1, 1)
    assert "keep no running statistics" in found.obstacle()


def test_where_float64_fails_it_says_why_and_takes_the_models_own_format():
    found = nature("OnlySingle")
    assert not found.double
    assert found.not_double == "TypeError: inputs must be float32"
    assert found.epsilon == torch.finfo(torch.float32).eps
    assert found.coupling < 1e-6
    assert found.notes() == [
        "compared in the model's own number format, since float64 fails: TypeError: inputs must be float32"
    ]
    cast = nature("CastsInside")
    assert not cast.double
    assert cast.not_double.startswith("RuntimeError: ")


def test_a_model_in_bf16_is_compared_in_bf16():
    found = nature("Bf16")
    assert not found.double
    assert found.epsilon == torch.finfo(torch.bfloat16).eps
    assert found.diagnosis() == ""


def test_several_heads_in_bf16_are_compared_in_bf16():
    assert nature("Bf16Heads").epsilon == torch.finfo(torch.bfloat16).eps


def test_an_unreadable_sample_is_skipped_where_the_config_says_so():
    found = nature("Unreadable", data={"on_error": "skip"})
    assert found.double
    assert found.coupling < 1e-12


def test_what_fails_in_every_format_is_raised():
    with pytest.raises(ValueError, match="the sheep are asleep"):
        nature("Raises")


def test_looking_does_not_depend_on_what_was_drawn_before():
    torch.manual_seed(5)
    one = nature("Normed")
    torch.manual_seed(6)
    assert nature("Normed") == one


def test_an_obstacle_names_no_more_than_three_operations():
    found = TaskProbe(random=["a"], still_random=["a", "b", "c", "d"])
    assert "(a, b, c)" in found.obstacle()
