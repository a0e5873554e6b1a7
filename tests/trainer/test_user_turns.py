"""A `Loop` with several optimizers that update in turn: the weights of plain torch with its two updates."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.errors import UsageError
from lockstep.trainer import user_exit
from tests import runs
from tests.ranks import run_ranks

SIZE, BATCH, EPOCHS = 42, 12, 3  # the last batch of an epoch has 6 samples
CONFIG = {"log.writers": ["json_lines"], "log.every_steps": 2, "device": "cpu"}


def pairs():
    drawn = torch.Generator().manual_seed(1)
    points = torch.randn(SIZE, 3, dtype=torch.float64, generator=drawn)
    return TensorDataset(points, torch.randn(SIZE, 2, dtype=torch.float64, generator=drawn))


def networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizers = {
        "critic": torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9)),
        "generator": torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9),
    }
    return generator, critic, optimizers


def critic_loss(generator, critic, batch):
    real, noise = batch
    return (softplus(-critic(real)) + softplus(critic(generator(noise)))).mean()


def generator_loss(generator, critic, batch):
    return softplus(-critic(generator(batch[1]))).mean()


def loop_of(folder, **options):
    generator, critic, optimizers = networks()
    options = {"global_batch": BATCH, "epochs": EPOCHS, "quiet": True, "config": CONFIG, "run_dir": folder} | options
    models = {"generator": generator, "critic": critic}
    return lockstep.Loop(models, optimizers, pairs(), **options), generator, critic


def trained(stops, options):
    """The weights, the samples of each step, and the last logged values."""
    seen = []
    with runs.shared_folder() as folder:
        for stop in stops:
            loop, generator, critic = loop_of(folder, **options)
            for step in loop:
                for _ in range(2):
                    for batch in step.turn("critic"):
                        step.backward(critic_loss(generator, critic, batch))
                if step.number % 2:
                    for batch in step.turn("generator"):
                        step.backward(generator_loss(generator, critic, batch))
                seen.append(sorted({index for indices in step.result.indices for index in indices}))
                if step.number == stop:
                    break
            loop.close()
        weights = {name: value.clone() for name, value in loop.model.state_dict().items()}
    return weights, seen, loop.results


def by_plain_torch(samples, clip_norm=None):
    generator, critic, optimizers = networks()
    data = pairs().tensors

    def update(name, network, loss):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
        optimizers[name].step()

    for number, indices in enumerate(samples, start=1):
        batch = [tensor[indices] for tensor in data]
        for _ in range(2):
            update("critic", critic, critic_loss(generator, critic, batch))
        if number % 2:
            update("generator", generator, generator_loss(generator, critic, batch))
    return {f"generator.{name}": value for name, value in generator.state_dict().items()} | {
        f"critic.{name}": value for name, value in critic.state_dict().items()
    }


@pytest.mark.cases("options0")
@pytest.mark.parametrize("options", [{}, {"micro_batch": 5, "clip_norm": 0.05}])
def test_two_optimizers_in_turn_end_with_the_weights_of_plain_torch(options):
    samples = run_ranks(1, trained, [None], options)[0][1]
    assert [len(indices) for indices in samples] == [12, 12, 12, 6] * EPOCHS
    expected = by_plain_torch(samples, options.get("clip_norm"))
    for world in (1, 2):
        weights, _, results = run_ranks(world, trained, [None], options)[0]
        assert runs.difference(weights, expected) < 1e-10, world
        assert results["train/loss/critic"] > 0
        assert results["train/loss/generator"] > 0
        assert {results["train/lr/critic"], results["train/lr/generator"]} == {0.02, 0.1}


@pytest.mark.exhaustive  # as test_two_optimizers_in_turn_end_with_the_weights_of_plain_torch
def test_a_resumed_loop_with_two_optimizers_ends_with_the_same_bits():
    for world in (1, 2):
        whole, *_ = run_ranks(world, trained, [None], {})[0]
        resumed, *_ = run_ranks(world, trained, [3, 8, None], {})[0]
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items()), world


def without_a_turn(step, generator, critic):
    for batch in step:
        step.backward(critic_loss(generator, critic, batch))


def of_nobody(step, generator, critic):
    next(step.turn("teacher"))


def not_ended(step, generator, critic):
    for batch in step.turn("critic"):
        step.backward(critic_loss(generator, critic, batch))
        break


def without_any(step, generator, critic):
    pass


def of_another(step, generator, critic):
    for batch in step.turn("critic"):
        step.backward(generator(batch[1]).sum())


def that_updates(step, generator, critic):
    for batch in step.turn("critic"):
        step.backward(critic_loss(generator, critic, batch))
        step._state.optimizer.members[1].step()


BODIES = {
    without_a_turn: "this Loop has several optimizers",
    of_nobody: "the Loop has 'critic' and 'generator'",
    not_ended: "the body of the loop ended before the update: only 1 of 2 were read",
    without_any: "its micro-batches were not read",
    of_another: "the loss depends on no trainable parameter",
    that_updates: "the body called optimizer.step()",
}


def run_body(loop, body, networks):
    for step in loop:
        body(step, *networks)


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_breaks_a_rule_of_turns_is_an_error(body, tmp_path):
    loop, *networks = loop_of(tmp_path, micro_batch=6)
    with pytest.raises(UsageError) as caught:
        run_body(loop, body, networks)
    assert BODIES[body] in str(caught.value)
    user_exit.fail_open(caught.value)


def test_what_several_optimizers_cannot_have_is_an_error(tmp_path):
    generator, critic, optimizers = networks()
    shared = optimizers | {"second": torch.optim.SGD(critic.parameters(), lr=0.1)}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["critic"], 2)
    cases = [
        (optimizers, {"units": len}, "units= is for one optimizer"),
        (optimizers, {"scheduler": scheduler}, "scheduler= is for one optimizer"),
        (optimizers, {"strategy": "fsdp"}, "it cannot be used with players"),
        (shared, {}, "two optimizers have the same parameter"),
        ({"critic": critic}, {}, "an optimizer is a Sequential"),
    ]
    for number, (given, options, text) in enumerate(cases):
        options = {"epochs": 1, "quiet": True, "config": CONFIG, "run_dir": tmp_path / str(number)} | options
        with pytest.raises(UsageError) as caught:
            lockstep.Loop({"generator": generator, "critic": critic}, given, pairs(), **options)
        assert text in str(caught.value)
