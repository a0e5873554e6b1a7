"""Right tasks of more kinds: statistics of the batch, draws in the loss, floors above zero, missing members."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task
from packages.lab.tests.verify.clean_tasks import clusters
from packages.lab.tests.verify.unusual_models import _Classifier


class _Unlabelled(Task):
    """Points without labels, as plain tensors; two views of each, which `prepare` draws."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, inputs):
            return functional.normalize(self.layers(inputs), dim=-1)

    def model(self):
        return self.Net()

    def train_data(self):
        return clusters(300)[0]

    def eval_data(self):
        return clusters(100, seed=1)[0]

    def prepare(self, sample, epoch, training):
        return sample + 0.2 * torch.randn(12), sample + 0.2 * torch.randn(12)

    def predict(self, model, batch):
        return model(batch[0])


def contrast(first, second, temperature=0.5):
    """The loss of SimCLR (Chen et al. 2020). At this temperature it cannot fall far."""
    views, count = torch.cat([first, second]), len(first)
    similar = (views @ views.T / temperature).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
    return functional.cross_entropy(similar, (torch.arange(2 * count) + count) % (2 * count), reduction="sum") / 2


class TwoViewsOfBatch(_Unlabelled):
    """The negatives are those of the micro-batch."""

    def loss(self, model, batch):
        return contrast(model(batch[0]), model(batch[1]))


class TwoViewsOfGlobalBatch(_Unlabelled):
    """The negatives are those of the global batch. Evaluations have neither a loss nor metrics."""

    def embed(self, model, batch):
        return model(batch[0]), model(batch[1])

    def loss(self, model, outputs):
        return contrast(*outputs)


class Decorrelated(_Unlabelled):
    """Correlations of the two views over a batch (Zbontar et al. 2021), without evaluation data."""

    def eval_data(self):
        return None

    def model(self):
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))

    def loss(self, model, batch):
        views = [model(view) for view in batch]
        views = [(view - view.mean(0)) / (view.var(0, unbiased=False) + 1e-4).sqrt() for view in views]
        count, found = len(views[0]), views[0].T @ views[1] / len(views[0])
        others = found - torch.diag(found.diagonal())
        return count * ((found.diagonal() - 1).square().sum() + 0.05 * others.square().sum())


class OnlyEmbeds(Task):
    """A task with `embed`, and with no other optional member but evaluation data."""

    def model(self):
        return nn.Linear(12, 4)

    def train_data(self):
        return TensorDataset(*clusters(300))

    def eval_data(self):
        return TensorDataset(*clusters(100, seed=1))

    def embed(self, model, batch):
        return model(batch[0]), batch[1]

    def loss(self, model, outputs):
        return functional.cross_entropy(*outputs, reduction="sum")


class BalancedExperts(_Classifier):
    """The experts are balanced by shares of each micro-batch (Fedus et al. 2022), once for each of its samples."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(12, 3)
            self.experts = nn.ModuleList(nn.Linear(12, 4) for _ in range(3))

        def forward(self, inputs):
            gates = self.gate(inputs).softmax(-1)
            largest, chosen = gates.max(-1)
            outputs = torch.stack([expert(inputs) for expert in self.experts], 1)[torch.arange(len(inputs)), chosen]
            self.balance = 3 * (functional.one_hot(chosen, 3).to(gates).mean(0) * gates.mean(0)).sum()
            return outputs * largest[:, None]

    coefficients = {"balance": 0.01}  # noqa: RUF012

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        outputs = model(batch[0])
        classes = functional.cross_entropy(outputs, batch[1], reduction="sum")
        return {"classes": classes, "balance": len(outputs) * model.balance}


class _Range(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                self.low.lerp_(inputs.min().to(self.low), 0.1)
                self.high.lerp_(inputs.max().to(self.high), 0.1)
        step = (self.high - self.low) / 255
        levels = ((inputs - self.low) / step).round().clamp(0, 255) * step + self.low
        return inputs + (levels - inputs).detach()


class Quantized(_Classifier):
    """Quantization-aware training: each micro-batch moves the range."""

    def model(self):
        return nn.Sequential(nn.Linear(12, 24), _Range(), nn.ReLU(), nn.Linear(24, 4))


class Sampled(_Classifier):
    """Policy gradient: the loss draws an action from the model's output."""

    def loss(self, model, batch):
        actions = torch.distributions.Categorical(logits=model(batch[0]))
        action = actions.sample()
        return -(actions.log_prob(action) * ((action == batch[1]).double() - 0.25)).sum()


class Denoised(Task):
    """Diffusion: noise of many strengths is added in the loss, and the model says which."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.times = nn.Embedding(20, 8)
            self.layers = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, 8))

        def forward(self, inputs, times):
            return self.layers(torch.cat([inputs, self.times(times)], -1))

    def model(self):
        return self.Net()

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset((torch.randn(300, 2, generator=generator) @ torch.randn(2, 8, generator=generator)).tanh())

    def loss(self, model, batch):
        clean, times = batch[0], torch.randint(20, (len(batch[0]),))
        noise, kept = torch.randn_like(clean), (1 - (times.to(clean) + 1) / 21)[:, None]
        return (model(kept * clean + (1 - kept.square()).sqrt() * noise, times) - noise).square().sum()


class Variational(Task):
    """A variational autoencoder with two heads, which draws in evaluations, too."""

    coefficients = {"divergence": 0.2}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 6), nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, inputs):
            mean, log_variance = self.encoder(inputs).chunk(2, -1)
            return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance

    def model(self):
        return self.Net()

    def train_data(self):
        return Denoised().train_data()

    def divergences(self, mean, log_variance):
        return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)

    def loss(self, model, batch):
        outputs, *latents = model(batch[0])
        return {"errors": (outputs - batch[0]).square().sum(), "divergence": self.divergences(*latents).sum()}


class CausalTokens(Task):
    """The next token, with a causal mask. The inputs and the targets are separate tensors."""

    is_causal = True

    class Net(nn.Module):
        def __init__(self, is_causal):
            super().__init__()
            self.is_causal = is_causal
            self.embed, self.places = nn.Embedding(14, 16), nn.Embedding(10, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 14)

        def forward(self, tokens):
            count = tokens.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool).triu(1) if self.is_causal else None
            return self.head(self.layer(self.embed(tokens) + self.places.weight[:count], src_mask=mask))

    def model(self):
        return self.Net(self.is_causal)

    def data(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        begins, steps = (torch.randint(1, most, (count, 1), generator=generator) for most in (12, 4))
        return TensorDataset((begins + steps * torch.arange(10)) % 12)

    def train_data(self):
        return self.data(300, 0)

    def eval_data(self):
        return self.data(60, 1)

    def prepare(self, sample, epoch, training):
        return sample[0][:-1], sample[0][1:]

    def weight(self, batch):
        return (batch[1] >= 0).sum()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).argmax(-1)


class MaskedTokensAnywhere(CausalTokens):
    """Masked tokens are predicted from those on both sides."""

    is_causal = False

    def prepare(self, sample, epoch, training):
        masked = torch.rand(10) < 0.3
        masked[int(torch.randint(10, ()))] = True
        return torch.where(masked, 13, sample[0]), torch.where(masked, sample[0], -100)


class MeanOfPasses(_Classifier):
    """Monte-Carlo dropout: a prediction is the mean of several passes with dropout."""

    def model(self):
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))

    def predict(self, model, batch):
        model[2].train()
        outputs = torch.stack([model(batch[0]).softmax(-1) for _ in range(5)]).mean(0)
        model[2].eval()
        return outputs


class StronglyAugmented(_Classifier):
    """Training inputs are scaled, noisy and partly blank."""

    def prepare(self, sample, epoch, training):
        inputs = (sample[0] - 0.5) / 2
        if training:
            inputs = inputs * (0.7 + 0.6 * torch.rand(())) + 0.3 * torch.randn(12)
            inputs = torch.where(torch.rand(12) < 0.2, torch.zeros(()), inputs)
        return inputs, sample[1]


class Distilled(Task):
    """A student learns the outputs of a frozen teacher, which the model returns, too."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(12, 4).requires_grad_(False)
            self.student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, features):
            return self.student(features), 3 * self.teacher(features)

    def model(self):
        return self.Pair()

    def train_data(self):
        return TensorDataset(torch.randn(200, 12, generator=torch.Generator().manual_seed(0)))

    def eval_data(self):
        return TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        student, taught = model(batch[0])
        return (student - taught).square().sum()

    def predict(self, model, batch):
        return model(batch[0])[0]
