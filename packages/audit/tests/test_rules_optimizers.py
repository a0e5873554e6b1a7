"""Rules on optimizers, schedulers and scalers."""

import pytest

from packages.audit.tests.made_events import Script, at


def rates(first, later=None, script=None):
    script = (script or Script()).optimizer().step(hyperparameters=lambda rank: [{"lr": first(rank), "name": "a"}])
    return script.step(hyperparameters=(lambda rank: [{"lr": later(rank), "name": "a"}]) if later else None)


def test_rates_that_differ_are_named_at_the_optimizer():
    (finding,) = rates(lambda rank: 0.1 * (1 + rank)).found("LS301")
    assert (finding.where.line, finding.step) == (7, 0)
    assert "lr at step 0: 0.1 on rank 0, 0.2 on rank 1" in finding.evidence
    later = rates(lambda rank: 0.1, lambda rank: 0.1 - 0.01 * rank)
    assert later.found("LS301")[0].where.line == 30
    scheduled = Script().add("scheduler", at=at(33), scheduler=0, per_step=1, step=1)
    assert "the scheduler of train.py:33" in rates(lambda r: 0.1, lambda r: 0.1 * r, scheduled).found("LS301")[0].cause


def test_rates_of_ranks_that_join_are_compared_in_turn():
    def joined(last):
        script = Script().optimizer()
        for rank, count in enumerate([3, 5]):
            for index in range(2 * count):
                rate = 0.2 if index < count else last(rank)
                script.step(rank, hyperparameters=[{"lr": rate}] if index in (0, count) else None)
        return script.add("loader_end", loader=0, epoch=0, batches=3, backwards=3, joined=True)

    assert joined(lambda rank: 0.1).found("LS301") == []
    assert joined(lambda rank: 0.1 + rank).found("LS301")


@pytest.mark.parametrize(
    "script",
    [
        rates(lambda rank: 0.1),
        rates(lambda rank: 0.1, lambda rank: 0.05),
        rates(lambda rank: 0.1 * (1 + rank), script=Script(how=None)),  # a search over learning rates
        rates(
            lambda rank: 0.1 * rank,
            script=Script(how=None).add("wrap", at=at(5), model=0, how="ddp", ranks=lambda r: [r]),
        ),
    ],
    ids=["equal", "schedule", "alone", "groups of one"],
)
def test_scripts_that_are_right_have_the_same_rates(script):
    assert script.errors() == set()


def plateau(metric, script=None):
    script = (script or Script()).optimizer().step(hyperparameters=[{"lr": 0.1}])
    script.add("scheduler", at=at(33), scheduler=0, metric=metric, **{"class": "ReduceLROnPlateau"}, per_step=1)
    return script.step(hyperparameters=lambda rank: [{"lr": 0.1 - 0.01 * rank * (metric(0) != metric(1))}])


def test_a_plateau_on_the_metric_of_one_rank_is_named_and_not_the_rates_that_follow():
    script = plateau(lambda rank: 0.5 + rank)
    (finding,) = script.found("LS302")
    assert finding.where.line == 33
    assert "lr then differs" in finding.evidence
    assert script.errors() == {"LS302"}
    assert plateau(lambda rank: 0.5).errors() == set()
    assert plateau(lambda rank: 0.5 + rank, Script(how=None)).errors() == set()


def orphan(owned=0, none=2, missing=("weight",), script=None):
    missing = {"0": list(missing)} if missing else {}
    return (script or Script(how="fsdp2")).optimizer(
        owned=owned, foreign=2 - owned, gradients_none=none, missing=missing
    )


def test_an_optimizer_without_a_parameter_of_the_model_is_named():
    (finding,) = orphan().found("LS303")
    assert (finding.where.line, finding.ranks) == (7, (0, 1))
    assert "fsdp2 at train.py:5 made new parameters" in finding.cause
    assert orphan(owned=2, none=0, missing=()).errors() == set()
    assert orphan(none=0).errors() == set()  # a second model that is not wrapped, such as a teacher's head
    assert orphan(missing=()).errors() == set()  # another optimizer has them
    assert orphan(owned=1, none=2).errors() == set()  # a part that is not used yet


def clipped(unscaled, scale=65536.0, clips=1):
    found = [{"at": at(28), "how": "norm", "limit": 1.0, "backwards_before": 1}] * clips
    return Script().optimizer().step(clips=found, scaler={"scale": scale, "unscaled_before_clip": unscaled})


def test_clipping_of_scaled_gradients_is_named():
    (finding,) = clipped(False).found("LS304")
    assert finding.where.line == 28
    assert "multiplied by 65536" in finding.evidence
    assert clipped(True).errors() == set()
    assert clipped(False, scale=1.0).errors() == set()
    assert clipped(False, clips=0).errors() == set()


def test_scalers_that_disagree_are_named():
    scales = Script().optimizer().step(scaler=lambda rank: {"scale": 1024.0 * (1 + rank)})
    assert "1024.0 on rank 0, 2048.0 on rank 1" in scales.found("LS305")[0].evidence
    skipped = Script().optimizer().step(scaler={"scale": 8.0}, skipped=lambda rank: rank == 1)
    assert "skipped on rank 1" in skipped.found("LS305")[0].evidence
    assert Script().optimizer().step(scaler={"scale": 8.0}).errors() == set()
    assert Script().optimizer().step(scaler={"scale": 8.0}, skipped=True).step(scaler={"scale": 4.0}).errors() == set()
    alone = Script(how=None).optimizer().step(scaler=lambda rank: {"scale": 8.0 + rank})
    assert alone.errors() == set()


def scheduled(*counts, script=None):
    script = (script or Script()).optimizer()
    for count in counts:
        script.step().add("scheduler", at=at(33), scheduler=0, per_step=count, **{"class": "LambdaLR"})
    return script


def test_a_scheduler_that_steps_for_each_rank_is_a_warning():
    (finding,) = scheduled(2, 2).found("LS306")
    assert "the number of ranks, 2" in finding.cause
    assert scheduled(2).found("LS306")[0].cause is None  # by chance, perhaps
    assert scheduled(1).ids() == set()
    assert scheduled(2, 1).ids() == set()  # once at the beginning
    accelerate = Script().add("framework", name="accelerate", version="1")
    assert scheduled(2, script=accelerate).ids() == set()  # by design


def test_updates_of_16_bit_weights_that_are_rounded_away_are_a_warning():
    def stepped(*left, kind="AdamW"):
        script = Script(how="fsdp2").optimizer(**{"class": kind})
        for each in left:
            script.step(rounded={"norm.weight": [64, each]})
        return script.found("LS311")

    (finding,) = stepped(64, 64, 60)
    assert (finding.where.line, "norm.weight" in finding.evidence) == (7, True)
    assert stepped(64, 64, 10) == stepped(64, 64) == stepped(64, 64, 64, kind="AnyPrecisionAdamW") == []
