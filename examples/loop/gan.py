"""A GAN that draws digits, with an optimizer for each network.

python gan.py
lockstep run --nproc 2 gan.py
"""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep_recipes.recipes.digits import Digits

EPOCHS, NOISE, BATCH = 10, 16, 64


class NoisyDigits(Dataset):
    def __init__(self):
        self.images = [image.reshape(1, 8, 8) / 255 for image, _ in Digits(training=True)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], torch.randn(NOISE)


torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(NOISE, 128), nn.Unflatten(1, (32, 2, 2)), nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Flatten(), nn.Linear(128, 1),
)  # fmt: skip
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = DataLoader(NoisyDigits(), batch_size=BATCH, shuffle=True)

loop = lockstep.Loop({"g": generator, "d": discriminator}, {"g": optimizer_g, "d": optimizer_d}, loader, epochs=EPOCHS)
for epoch, steps in loop.epochs():
    for step in steps:
        for real, noise in step.turn("d"):
            fake = generator(noise).detach()
            loss_d = softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()
            step.backward(loss_d)

        for _, noise in step.turn("g"):
            loss_g = softplus(-discriminator(generator(noise))).mean()
            step.backward(loss_g)
    print(f"epoch {epoch + 1}: discriminator {loss_d.item():.3f}, generator {loss_g.item():.3f}")
loop.save("generator.pt", generator)
