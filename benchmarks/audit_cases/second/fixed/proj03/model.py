from torch import nn

from .quantizer import EMAQuantizer


class VQAutoencoder(nn.Module):
    def __init__(self, dim=16, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, latent))
        self.quantizer = EMAQuantizer(dim=latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        q, commit = self.quantizer(self.encoder(x))
        return self.decoder(q), commit
