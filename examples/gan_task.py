"""Two adversarial networks that draw digits, with alternating updates.

lockstep train examples/gan_task.py:Dcgan --nproc 2 batch.global=64 train.epochs=20 optim.args.betas=[0.5,0.999]
lockstep train examples/gan_task.py:WassersteinGan --nproc 2 batch.global=64 train.epochs=20
"""

import torch
from torch import nn
from torch.nn.functional import softplus

from lockstep import AlternatingTask, Player
from lockstep_recipes.recipes.digits import Digits

NOISE = 16


def generator():
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 4),
        nn.Unflatten(1, (64, 2, 2)),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.GroupNorm(8, 32),  # BatchNorm would normalise each micro-batch separately
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Sigmoid(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 4, 1),
    )


class Dcgan(AlternatingTask):
    """Radford et al. 2016: in each step the discriminator updates, then the generator, with the same images."""

    players = (Player("discriminator", "discriminator.*"), Player("generator", "generator.*"))

    def model(self):
        return nn.ModuleDict({"generator": generator(), "discriminator": discriminator()})

    def train_data(self):
        return Digits(training=True)

    def prepare(self, sample, epoch, training):
        # Noise that is drawn here belongs to the sample. Noise drawn in a loss would differ between ranks.
        return sample[0].reshape(1, 8, 8) / 255, torch.randn(NOISE), torch.rand(())

    def discriminator_loss(self, model, batch):
        real, noise, _ = batch
        fake = model["generator"](noise).detach()
        return (softplus(-model["discriminator"](real)) + softplus(model["discriminator"](fake))).sum()

    def generator_loss(self, model, batch):
        return softplus(-model["discriminator"](model["generator"](batch[1]))).sum()

    def predict(self, model, batch):
        return model["generator"](batch[1])


class WassersteinGan(Dcgan):
    """Gulrajani et al. 2017: the critic updates in each step, and the generator in every fifth step."""

    players = (Player("critic", "discriminator.*"), Player("generator", "generator.*", every=5))

    def critic_loss(self, model, batch):
        real, noise, share = batch
        critic, fake = model["discriminator"], model["generator"](noise).detach()
        with torch.enable_grad():  # an evaluation has no gradients, but the penalty needs one
            share = share[:, None, None, None]
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.flatten(1).norm(dim=1) - 1).square()
        return (critic(fake) - critic(real)).sum() + penalty.sum()

    def generator_loss(self, model, batch):
        return -model["discriminator"](model["generator"](batch[1])).sum()
