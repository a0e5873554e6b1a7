"""What a forward and a backward pass show about a task."""

from pathlib import Path

import pytest
import torch

from lockstep_lab.verify.task_probe import TaskProbe, probe_task
from tests import runs
from tests.selection import mainly

HERE = Path(__file__).resolve().parent
RIGHT, ODD, BROKEN = HERE / "clean_tasks.py", HERE / "odd_tasks.py", HERE / "broken_tasks.py"
MODELS, LOSSES = HERE / "unusual_models.py", HERE / "unusual_losses.py"


def probe(name, file=ODD, part=29, **sections):
    return probe_task(runs.config(task={"kind": f"{file}:{name}"}, **sections), part)


def test_a_plain_task_has_nothing_to_say():
    found = probe("Base", RIGHT)
    assert (
        found.random,
        found.random_without_dropout,
        found.dropouts,
        found.batch_norms,
        found.without_statistics,
    ) == ([], [], 0, 0, 0)
    assert found.float64
    assert found.epsilon == torch.finfo(torch.float64).eps
    assert found.coupling < 1e-12
    assert (found.mean_heads, found.random_in_collate) == ([], [])
    assert (found.notes(), found.obstacle(), found.diagnosis()) == ([], None, "")
    assert (found.remarks, found.cause_of_indeterminism(), found.prediction_difference) == ([], "", "")


def test_dropout_is_found_in_all_its_forms_and_silenced():
    found = probe("Dropout", RIGHT)
    assert set(found.random) == {"bernoulli_", "rand"} or {"native_dropout", "rand"} <= set(found.random)
    assert found.random_without_dropout == []
    assert found.dropouts == 2  # the module's and the attribute; the function has none
    assert found.coupling < 1e-12
    assert found.notes() == ["dropout is off for this comparison: its draws depend on the number of ranks"]
    assert found.obstacle() is None


@pytest.mark.parametrize(("name", "dropouts"), [("Attention", 4), ("Recurrent", 1)])
def test_dropout_in_attention_and_between_recurrent_layers_is_found_and_silenced(name, dropouts):
    found = probe(name, RIGHT)
    assert found.random
    assert found.random_without_dropout == []
    assert found.dropouts == dropouts
    assert found.coupling < 1e-12


def test_other_random_operations_are_named_and_an_obstacle():
    found = probe("Noisy")
    assert found.random == found.random_without_dropout == ["randn_like", "bernoulli"]
    assert found.notes() == []
    assert "randn_like, bernoulli" in found.obstacle()


def test_random_numbers_in_evaluation_mode_are_told_from_those_of_training():
    found = probe("Dropout", RIGHT)
    assert (found.random_in_evaluation, found.random_in_prediction) == ([], [])
    assert probe("Noisy").random_in_evaluation == ["randn_like", "bernoulli"]
    found = probe("SampledPredictions")
    assert (found.random, found.random_in_evaluation, found.random_in_prediction) == ([], [], ["multinomial"])


def test_pythons_and_numpys_random_numbers_are_found():
    assert probe("PythonsRandom").random_without_dropout == ["Python's random"]
    found = probe("NumpysRandom")
    assert found.random_without_dropout == ["numpy.random"]
    assert "numpy.random" in found.obstacle()


def test_random_numbers_of_preparation_are_none_of_the_models():
    found = probe("Augmented", RIGHT)
    assert (found.random, found.random_without_dropout) == ([], [])


@pytest.mark.parametrize(("name", "generator"), [("MixedByNumpy", "numpy.random"), ("MixedByTorch", "torch")])
def test_random_numbers_of_collate_are_found_and_an_obstacle(name, generator):
    found = probe(name)
    assert found.random_in_collate == [generator]
    assert found.random == []
    assert found.obstacle() == f"Task.collate draws random numbers ({generator}), different ones for each micro-batch"
    found = probe("Augmented", RIGHT)
    assert (found.random_in_collate, found.obstacle()) == ([], None)


def test_attention_without_dropout_is_not_random():
    found = probe("Attention")
    assert (found.random, found.random_without_dropout, found.dropouts) == ([], [], 0)
    assert found.obstacle() is None


def test_a_mean_instead_of_a_sum_is_found():
    found = probe("Mean")
    assert found.mean_heads == ["loss"]
    assert found.coupling == pytest.approx(0.5)
    assert (
        "Task.loss must return a SUM over its units (reduction='sum'), but returns a mean: off by" in found.diagnosis()
    )
    found = probe("MeanOfHeads")
    assert found.mean_heads == ["a", "b"]
    assert "but returns a mean for 'a', 'b'" in found.diagnosis()


@pytest.mark.parametrize(
    ("name", "heads"),
    [("Odd", ["loss"]), ("MaskedMean", ["loss"]), ("MeanOfOneHead", ["a"]), ("MeanOverSamples", ["b"])],
)
def test_a_mean_is_found_whatever_the_halves_weigh(name, heads):
    """A mean over valid labels, of which one half has more; over samples; or in a small head beside a large sum."""
    found = probe(name)
    assert found.mean_heads == heads
    assert "must return a SUM over its units (reduction='sum'), but returns a mean" in found.diagnosis()


def test_samples_that_influence_each_other_are_found():
    found = probe("Coupled")
    assert found.coupling > 1e-3
    assert not found.mean_heads
    assert "samples influence each other" in found.diagnosis()


def test_the_line_in_which_samples_meet_is_named_with_the_way_out():
    lines = ODD.read_text().splitlines()
    places = [number for number, line in enumerate(lines, start=1) if line.endswith("# here samples meet")]
    for (name, operation), line in zip(
        (("DiceOfBatch", "div"), ("ClassWeightsOfBatch", "cross_entropy")), places, strict=True
    ):
        said = probe(name).diagnosis()
        assert f"samples influence each other, first in `{operation}` at odd_tasks.py:{line}, or" in said, said
        assert "reduction='sum'" not in said
        for remedy in ("Task.embed", "Task.weight returns the sum of the weights"):
            assert remedy in said
    assert "samples influence each other, first in the model (Centred), or" in probe("CoupledInModel").diagnosis()
    assert probe("Base", RIGHT).meets_at == ""


def test_weights_by_head_and_masks_are_no_coupling():
    found = probe("Horizons", RIGHT)
    assert found.coupling < 1e-6
    assert found.diagnosis() == ""


def test_a_single_sample_has_no_halves():
    found = probe("Single", part=5)
    assert (found.coupling, found.mean_heads) == (0.0, [])


def test_batch_norm_is_counted_and_no_coupling_once_it_is_fixed():
    found = probe("Normed")
    assert (found.batch_norms, found.without_statistics, found.dropouts) == (2, 0, 1)
    assert found.coupling < 1e-12
    assert found.obstacle() is None
    assert any(note.startswith("2 BatchNorm modules keep fixed statistics") for note in found.notes())


def test_batch_norm_without_statistics_is_an_obstacle():
    found = probe("Unfixable")
    assert (found.batch_norms, found.without_statistics) == (1, 1)
    assert "keep no running statistics" in found.obstacle()


def test_a_model_that_converts_its_own_parameters_is_compared_in_their_format():
    found = probe("ConvertsItself")
    assert found.float64_error == "TypeError: the forward pass converts the parameter weight to torch.float32"
    assert found.epsilon == torch.finfo(torch.float32).eps


def test_where_float64_fails_it_says_why_and_takes_the_models_own_format():
    found = probe("OnlySingle")
    assert not found.float64
    assert found.float64_error == "TypeError: inputs must be float32"
    assert found.epsilon == torch.finfo(torch.float32).eps
    assert found.coupling < 1e-6
    assert found.notes() == [
        "compared in the model's own number format, because float64 fails: TypeError: inputs must be float32"
    ]
    cast = probe("CastsInside")
    assert not cast.float64
    assert cast.float64_error.startswith("RuntimeError: ")


def test_a_model_in_bf16_is_compared_in_bf16():
    found = probe("Bf16")
    assert not found.float64
    assert found.epsilon == torch.finfo(torch.bfloat16).eps
    assert found.diagnosis() == ""


def test_several_heads_in_bf16_are_compared_in_bf16():
    assert probe("Bf16Heads").epsilon == torch.finfo(torch.bfloat16).eps


def test_an_unreadable_sample_is_skipped_where_the_config_says_so():
    found = probe("Unreadable", data={"on_error": "skip"})
    assert found.float64
    assert found.coupling < 1e-12


def test_what_fails_in_every_format_is_raised():
    with pytest.raises(ValueError, match="the sheep are asleep"):
        probe("Raises")


def test_looking_does_not_depend_on_what_was_drawn_before():
    torch.manual_seed(5)
    one = probe("Normed")
    torch.manual_seed(6)
    assert probe("Normed") == one


def test_an_obstacle_names_no_more_than_three_operations():
    found = TaskProbe(random=["a"], random_without_dropout=["a", "b", "c", "d"])
    assert "(a, b, c)" in found.obstacle()


def test_a_generator_that_reading_a_sample_seeds_is_found():
    assert (probe("Augmented", RIGHT).seeded_for_sample, probe("Augmented", RIGHT).seeded_alike) == ([], [])
    found = probe("SeedsTorch", BROKEN)
    assert (found.seeded_for_sample, found.seeded_alike) == (["torch"], ["torch"])
    assert probe("SeedsNumpy", BROKEN).seeded_alike == ["numpy.random"]
    by_index = probe("SeededBySample")
    assert (by_index.seeded_for_sample, by_index.seeded_alike) == (["torch"], [])


@pytest.mark.parametrize("name", ["WeightAtLeastFour", "WeightIsShare", "Masked"])
def test_a_weight_that_does_not_add_up_is_noticed(name):
    found = probe(name, BROKEN)
    assert bool(found.weight_difference) == (name != "Masked")


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("ClockSeededModel", "model_difference", "first in body.weight"),
        pytest.param("ModeByClock", "model_difference", "body.scale is 1.", marks=pytest.mark.exhaustive),
        ("NoisyLoss", "loss_difference", " and "),
        pytest.param("NoisyInEvaluation", "prediction_difference", " and ", marks=pytest.mark.exhaustive),
        pytest.param(
            "BranchOnFirstRankOfGroup",
            "rank_difference",
            "second.bias is unused only on rank 1",
            marks=pytest.mark.exhaustive,
        ),
        ("BranchOnFirstRank", "rank_difference", "second.bias is unused only on rank 1"),
    ],
)
def test_the_cause_of_a_difference_is_found(monkeypatch, name, field, said):
    monkeypatch.setenv("RANK", "0")  # as in the processes of a verification
    found = probe(name, BROKEN)
    assert said in getattr(found, field)
    others = {"model_difference", "loss_difference", "prediction_difference", "rank_difference"} - {field}
    assert not any(getattr(found, other) for other in others)


@pytest.mark.parametrize(("name", "said"), [("WrongBackward", "not the derivative"), ("PaddingCounted", "Task.weight")])
def test_what_may_be_wrong_is_remarked(name, said):
    (remark,) = probe(name, BROKEN).remarks
    assert said in remark


def test_buffers_that_each_pass_moves_are_found():
    found = probe("SpectralNorm", MODELS)
    assert found.moving_buffers == ["0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"]
    assert found.moving == 0.0
    assert found.coupling < 1e-12
    assert found.obstacle() is None
    assert found.notes()[0].startswith("2 buffers that each training pass changes are restored after each pass")
    assert probe("AverageInside", MODELS).moving_buffers == []  # no training pass reads them


def test_a_model_that_counts_its_passes_elsewhere_is_an_obstacle():
    found = probe("CountsPasses")
    assert found.moving > 0.01
    assert "a second training pass on the same batch has a different loss" in found.obstacle()


def test_a_loss_without_labels_that_compares_samples_is_an_obstacle():
    found = probe("FixedTemperature", LOSSES)
    assert "with matmul at unusual_losses.py:" in found.compares_samples
    assert found.without_labels
    assert "as with in-batch negatives" in found.obstacle()
    found = probe("Triplets", LOSSES)
    assert (found.without_labels, found.compares_samples) == (True, "")
    assert not probe("Base", RIGHT).without_labels
    found = probe("Coupled")  # has labels
    assert (found.compares_samples, found.obstacle()) == ("", None)
    found = probe("CoupledInModel")
    assert found.coupling > 1e-3
    assert (found.compares_samples, found.obstacle()) == ("", None)


@pytest.mark.parametrize(
    ("name", "operation"),
    mainly(
        [("ClassContrast", "eq"), ("TwoCalls", "matmul")],
        [
            ("ClassContrast", "eq"),
            ("TwoCalls", "matmul"),
            ("PairsOfScores", "sub"),
            ("RiskSets", "ge"),
            ("SortedRiskSets", "argsort"),
            ("HardestHalf", "topk"),
        ],
    ),
)
def test_a_loss_with_labels_that_compares_samples_is_an_obstacle(name, operation):
    found = probe(name, LOSSES)
    assert found.compares_samples.startswith(f"with {operation} at unusual_losses.py:")
    assert not found.without_labels
    assert found.obstacle().startswith("the loss of a batch is not the sum over its parts (off by ")


@pytest.mark.parametrize("seed", [0, 4, 8, 10])
def test_a_cut_that_shows_no_coupling_by_chance_is_not_the_last(seed):
    """With these seeds, the hardest half of all samples is the hardest half of both halves."""
    found = probe("HardestHalf", LOSSES, part=400 if seed == 0 else 160, seed=seed)
    assert found.compares_samples
    assert found.obstacle()


@pytest.mark.parametrize("name", ["MeanContrast", "MeanClassContrast", "MeanOfPairs"])
def test_a_mean_over_samples_that_are_compared_is_no_obstacle(name):
    found = probe(name, BROKEN)
    assert found.mean_heads == ["loss"]
    assert found.obstacle() is None
    assert "Task.loss must return a SUM over its units" in found.diagnosis()


@pytest.mark.parametrize("name", ["SoftmaxOverSamples", "CoupledLoss", "OutputsAgainstAllLabels"])
def test_a_loss_that_mixes_samples_by_mistake_is_no_obstacle(name):
    found = probe(name, BROKEN)
    assert found.compares_samples == ""
    assert found.obstacle() is None
    assert "samples influence each other" in found.diagnosis()


def test_collectives_of_the_loss_are_found_without_other_ranks():
    found = probe("GatheredNegatives", LOSSES)
    assert found.collectives == ["allgather"]
    assert "Task.loss makes collectives (allgather)" in found.obstacle()
    assert not torch.distributed.is_initialized()
    assert probe("Small").collectives == []


def test_complex_weights_are_examined_in_double_precision():
    found = probe("ComplexWeights", MODELS)
    assert found.float64
    assert found.coupling < 1e-13
