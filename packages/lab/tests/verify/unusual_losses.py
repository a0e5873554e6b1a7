"""Right tasks with unusual losses, as users write them: `lockstep verify` must find no fault in them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from lockstep import Presenter, Task
from packages.lab.tests.verify.unusual_models import _Classifier


class _ShowsNumbers(Presenter):
    def describe(self, output):
        return {"output": output.tolist()}

    def truth(self, sample):
        return sample[-1].tolist()


class _Regression(Task):
    """Ten numbers in, targets that are a smooth function of them."""

    presenter = _ShowsNumbers
    overrides = {"optim.lr": "0.02"}  # noqa: RUF012
    outputs = 1

    def __init__(self):
        self.train, self.held_out = self.data(400, 0), self.data(100, 1)

    def inputs(self, count, seed):
        return torch.randn(count, 10, generator=torch.Generator().manual_seed(seed))

    def signal(self, inputs):
        directions = torch.randn(10, self.outputs, generator=torch.Generator().manual_seed(42))
        return (inputs @ directions / 3).tanh()

    def data(self, count, seed):
        inputs = self.inputs(count, seed)
        noise = torch.randn(count, self.outputs, generator=torch.Generator().manual_seed(seed + 7))
        return TensorDataset(inputs, self.signal(inputs) + 0.05 * noise)

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, self.outputs))

    def train_data(self):
        return self.train

    def eval_data(self):
        return self.held_out

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()

    def predict(self, model, batch):
        return model(batch[0])


class Quantiles(_Regression):
    """Three quantiles at once, by the pinball loss."""

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(self, model, batch):
        error = batch[1] - model(batch[0])
        levels = error.new_tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * error, (levels - 1) * error).sum()


class Gaussian(_Regression):
    """Mean and variance of each target, by the likelihood, which may be negative."""

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(self, model, batch):
        mean, log_variance = model(batch[0]).chunk(2, dim=1)
        variance = functional.softplus(log_variance) + 1e-3
        return functional.gaussian_nll_loss(mean, batch[1], variance, reduction="sum")


class Autoencoder(_Regression):
    """A variational autoencoder: random in training, the mean of the latents in evaluation."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
            self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))

        def forward(self, inputs):
            mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
            latents = mean
            if self.training:
                latents = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            return self.decoder(latents), mean, log_variance

    def data(self, count, seed):
        latents = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
        mixing = torch.randn(3, 10, generator=torch.Generator().manual_seed(42))
        return TensorDataset(latents @ mixing)

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        outputs, mean, log_variance = model(batch[0])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (outputs - batch[0]).square().sum() + 0.1 * divergence

    def predict(self, model, batch):
        return model(batch[0])[0]


class Diffusion(_Regression):
    """Noise is added in the loss, and the model says which."""

    def data(self, count, seed):
        return TensorDataset(torch.full((count, 2), 2.0) + 0.1 * self.inputs(count, seed)[:, :2])

    def model(self):
        return nn.Sequential(nn.Linear(3, 48), nn.SiLU(), nn.Linear(48, 2))

    def loss(self, model, batch):
        (clean,) = batch
        time = torch.rand(len(clean), 1, dtype=clean.dtype) * 0.8 + 0.2
        noise = torch.randn_like(clean)
        noisy = (1 - time) * clean + time * noise
        return (model(torch.cat([noisy, time], dim=1)) - noise).square().sum()

    def predict(self, model, batch):
        return model(torch.cat([batch[0], torch.ones_like(batch[0][:, :1])], dim=1))


class _TwoViews(_Classifier):
    """Embeddings of two views of each sample."""

    overrides = {"optim.lr": "0.02"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
            self.log_scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, views):
            return functional.normalize(self.layers(views.flatten(0, 1)).view(*views.shape[:2], 8), dim=-1)

    def __init__(self):
        self.train, self.held_out = self.views(400, 0), self.views(120, 1)

    def views(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(count, 1, 12, generator=generator)
        return TensorDataset(base + 0.2 * torch.randn(count, 2, 12, generator=generator))

    def model(self):
        return self.Net()

    def predict(self, model, batch):
        return model(batch[0])[:, 0]

    def metrics(self):
        return None


class InBatchNegatives(_TwoViews):
    """Contrastive learning: the other samples of the micro-batch are the negatives."""

    def loss(self, model, batch):
        first, second = model(batch[0]).unbind(1)
        similarity = first @ second.T * model.log_scale.exp()
        return functional.cross_entropy(similarity, torch.arange(len(first)), reduction="sum")


class FixedTemperature(_TwoViews):
    """The same with a fixed temperature, so that all parameters are layers."""

    def model(self):
        net = self.Net()
        net.log_scale.requires_grad_(False)
        return net

    def loss(self, model, batch):
        first, second = model(batch[0]).unbind(1)
        return functional.cross_entropy(first @ second.T * 5, torch.arange(len(first)), reduction="sum")


class GatheredNegatives(FixedTemperature):
    """The negatives are those of all ranks, gathered in the loss of training. All micro-batches have the same size."""

    overrides = {"optim.lr": "0.02", "data.drop_last": "true"}  # noqa: RUF012

    def loss(self, model, batch):
        first, second = model(batch[0]).unbind(1)
        candidates, begin = second, 0
        if torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [torch.empty_like(second) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, second.detach().contiguous())
            gathered[dist.get_rank()] = second
            candidates, begin = torch.cat(gathered), dist.get_rank() * len(second)
        labels = torch.arange(len(first)) + begin
        return functional.cross_entropy(first @ candidates.T * 5, labels, reduction="sum")


class ClassContrast(_Classifier):
    """Supervised contrastive learning (Khosla et al. 2020). The unit is the sample that has another of its class."""

    def positives(self, labels):
        return (labels[:, None] == labels).logical_and(~torch.eye(len(labels), dtype=torch.bool))

    def weight(self, batch):
        return self.positives(batch[1]).any(dim=1).sum()

    def loss(self, model, batch):
        embedded = functional.normalize(model(batch[0]), dim=1)
        positives = self.positives(batch[1])
        others = (embedded @ embedded.T / 0.2).masked_fill(torch.eye(len(embedded), dtype=torch.bool), -1e9)
        logs = others.log_softmax(dim=1)
        return -((logs * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).sum()

    def metrics(self):
        return None


class TwoCalls(_TwoViews):
    """In-batch negatives; the model is called once for each view, and labels weigh the samples."""

    def __init__(self):
        self.train, self.held_out = (
            TensorDataset(*views.tensors, 1.0 + torch.arange(len(views)) % 3)
            for views in (self.views(400, 0), self.views(120, 1))
        )

    def model(self):
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))

    def weight(self, batch):
        return batch[1].sum()

    def loss(self, model, batch):
        first, second = (functional.normalize(model(view), dim=-1) for view in batch[0].unbind(1))
        losses = functional.cross_entropy(first @ second.T * 5, torch.arange(len(first)), reduction="none")
        return (losses * batch[1]).sum()

    def predict(self, model, batch):
        return model(batch[0][:, 0])


class PairsOfScores(_Regression):
    """The order of each pair of samples in the micro-batch is learned. The unit is the pair of different targets."""

    def ordered(self, batch):
        return batch[1] > batch[1].T

    def weight(self, batch):
        return self.ordered(batch).sum()

    def loss(self, model, batch):
        scores = model(batch[0])
        return (functional.softplus(-(scores - scores.T)) * self.ordered(batch)).sum()


class RiskSets(_Regression):
    """Cox's partial likelihood (1972): at each event, the samples of the micro-batch that are still at risk."""

    def data(self, count, seed):
        inputs = self.inputs(count, seed)
        generator = torch.Generator().manual_seed(seed + 7)
        times = torch.empty(count).exponential_(generator=generator) * (-2 * self.signal(inputs)[:, 0]).exp()
        return TensorDataset(inputs, times.clamp(max=3.0), (times < 3.0).float())

    def weight(self, batch):
        return batch[2].sum()

    def loss(self, model, batch):
        inputs, times, seen = batch
        risk = model(inputs)[:, 0]
        at_risk = times[None, :] >= times[:, None]
        total = risk.expand(len(risk), -1).masked_fill(~at_risk, -1e9).logsumexp(dim=1)
        return (seen * (total - risk)).sum()


class SortedRiskSets(RiskSets):
    """The same by a cumulative sum over the samples, from the last time to the first."""

    def loss(self, model, batch):
        inputs, times, seen = batch
        order = times.argsort(descending=True)
        risk = model(inputs)[order, 0]
        return (seen[order] * (risk.logcumsumexp(dim=0) - risk)).sum()


class HardestHalf(_Classifier):
    """The harder half of each micro-batch counts."""

    def weight(self, batch):
        return torch.tensor(-(-len(batch[1]) // 2))

    def loss(self, model, batch):
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.topk(-(-len(losses) // 2)).values.sum()


class Triplets(_TwoViews):
    """Triplets of an anchor, a positive and a negative, made by the data set."""

    def views(self, count, seed):
        pairs = super().views(count, seed).tensors[0]
        return TensorDataset(torch.cat([pairs, pairs.roll(1, 0)[:, :1]], dim=1))

    def model(self):
        net = self.Net()
        net.log_scale.requires_grad_(False)
        return net

    def loss(self, model, batch):
        return functional.triplet_margin_loss(*model(batch[0]).unbind(1), margin=1.0, reduction="sum")


class Survival(_Regression):
    """Times of events, some of them censored: an exponential model."""

    def data(self, count, seed):
        inputs = self.inputs(count, seed)
        generator = torch.Generator().manual_seed(seed + 7)
        times = torch.empty(count).exponential_(generator=generator) * (2 * self.signal(inputs)[:, 0]).exp()
        return TensorDataset(inputs, times.clamp(max=3.0), (times < 3.0).float())

    def loss(self, model, batch):
        inputs, times, seen = batch
        log_rate = model(inputs)[:, 0]
        return (log_rate.exp() * times - seen * log_rate).sum()


class Counts(_Regression):
    """Poisson regression of counts, with an exposure as its unit."""

    def data(self, count, seed):
        inputs = self.inputs(count, seed)
        generator = torch.Generator().manual_seed(seed + 7)
        exposure = 1 + 4 * torch.rand(count, generator=generator)
        counts = torch.poisson(exposure * (3 * self.signal(inputs)[:, 0]).exp(), generator=generator)
        return TensorDataset(inputs, exposure, counts)

    def weight(self, batch):
        return batch[1].sum()

    def loss(self, model, batch):
        inputs, exposure, counts = batch
        return functional.poisson_nll_loss(model(inputs)[:, 0] + exposure.log(), counts, reduction="sum")


class Ranking(_Regression):
    """Lists of five documents: the unit is the pair of different relevance."""

    def data(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 5, 10, generator=generator)
        return TensorDataset(inputs, (2 * self.signal(inputs)[..., 0]).round())

    def ordered(self, batch):
        return batch[1].unsqueeze(2) > batch[1].unsqueeze(1)

    def weight(self, batch):
        return self.ordered(batch).sum()

    def loss(self, model, batch):
        scores = model(batch[0])[..., 0]
        differences = scores.unsqueeze(2) - scores.unsqueeze(1)
        return (functional.softplus(-differences) * self.ordered(batch)).sum()


class MaskedTokens(Task):
    """A masked language model: `prepare` masks tokens, the unit is the masked token, and some sequences have none."""

    overrides = {"optim.lr": "0.02"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(9, 24), nn.Linear(24 * 6, 96), nn.Linear(96, 48)

        def forward(self, tokens):
            return self.head(self.mix(self.embed(tokens).flatten(1)).relu()).view(-1, 6, 8)

    def __init__(self):
        begins = torch.randint(8, (460, 1), generator=torch.Generator().manual_seed(5))
        self.tokens = (begins + torch.arange(6)) % 8

    def model(self):
        return self.Net()

    def train_data(self):
        return TensorDataset(self.tokens[:360])

    def eval_data(self):
        return TensorDataset(self.tokens[360:])

    def prepare(self, sample, epoch, training):
        (tokens,) = sample
        masked = torch.rand(6) < 0.2 if training else torch.arange(6) == 2
        return tokens.masked_fill(masked, 8), tokens.masked_fill(~masked, -100)

    def weight(self, batch):
        return (batch[1] >= 0).sum()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).argmax(-1)


class Ctc(Task):
    """Labels of different lengths are aligned with the frames of a signal."""

    overrides = {"optim.lr": "0.02"}  # noqa: RUF012

    def __init__(self):
        self.train, self.held_out = self.data(240, 0), self.data(60, 1)

    def data(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 4, (count,), generator=generator)
        labels = torch.randint(1, 5, (count, 3), generator=generator)
        labels[:, 1] = labels[:, 0] % 4 + 1
        labels[:, 2] = labels[:, 1] % 4 + 1
        labels *= torch.arange(3) < lengths[:, None]
        frames = functional.one_hot(labels.repeat_interleave(3, dim=1), 5).float()
        return TensorDataset(frames + 0.1 * torch.randn(frames.shape, generator=generator), labels, lengths)

    def model(self):
        return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 5))

    def train_data(self):
        return self.train

    def eval_data(self):
        return self.held_out

    def loss(self, model, batch):
        frames, labels, lengths = batch
        scores = model(frames).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((len(frames),), 9)
        return functional.ctc_loss(scores, labels, sizes, lengths, reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).argmax(-1)


class Boxes(Dataset):
    """Pictures with no, one or two bright squares."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pictures, self.boxes = 0.1 * torch.rand(count, 1, 8, 8, generator=generator), []
        for picture in self.pictures:
            number = int(torch.randint(3, (), generator=generator))
            corners = [(4 * place, int(torch.randint(6, (), generator=generator))) for place in range(number)]
            for row, column in corners:
                picture[0, row : row + 2, column : column + 2] = 1.0
            self.boxes.append(torch.tensor(corners, dtype=torch.float32).reshape(-1, 2))

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        return self.pictures[index], self.boxes[index]


class Detection(Task):
    """Some pictures have no box: one head counts pictures, the other boxes; batches are lists."""

    overrides = {"batch.global": "12"}  # noqa: RUF012

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4))

    def train_data(self):
        return Boxes(240, 0)

    def eval_data(self):
        return Boxes(50, 1)

    def collate(self, samples):
        return {"pictures": torch.stack([picture for picture, _ in samples]), "boxes": [boxes for _, boxes in samples]}

    def weight(self, batch):
        return {"present": 2 * len(batch["boxes"]), "column": sum(len(boxes) for boxes in batch["boxes"])}

    def loss(self, model, batch):
        outputs = model(batch["pictures"])
        present = outputs.new_tensor([[float(len(boxes) > place) for place in range(2)] for boxes in batch["boxes"]])
        found = functional.binary_cross_entropy_with_logits(outputs[:, :2], present, reduction="sum")
        places = [
            (outputs[number, 2 + place] - boxes[place, 1] / 6).square()
            for number, boxes in enumerate(batch["boxes"])
            for place in range(len(boxes))
        ]
        return {"present": found, "column": torch.stack(places).sum() if places else outputs.sum() * 0.0}

    def predict(self, model, batch):
        return model(batch["pictures"])


class Segmentation(Task):
    """Pixels with an ignored label, unevenly over pictures; the metric is the overlap."""

    overrides = {"batch.global": "12"}  # noqa: RUF012

    def __init__(self):
        self.train, self.held_out = self.data(200, 0), self.data(40, 1)

    def data(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        smooth = torch.randn(count, 1, 4, 4, generator=generator)
        pictures = functional.interpolate(smooth, size=(12, 12), mode="bilinear")
        labels = (pictures[:, 0] > 0).long()
        ignored = torch.rand(count, 12, 12, generator=generator) < torch.rand(count, 1, 1, generator=generator)
        return TensorDataset(pictures, labels.masked_fill(ignored, 255))

    def model(self):
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def train_data(self):
        return self.train

    def eval_data(self):
        return self.held_out

    def weight(self, batch):
        return (batch[1] != 255).sum()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=255, reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).argmax(1)

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import BinaryJaccardIndex

        return MetricCollection({"overlap": BinaryJaccardIndex(ignore_index=255)})


class ClassWeights(_Classifier):
    """A class counts more, in the loss and in the units."""

    class_weights = torch.tensor([1.0, 1.0, 3.0, 0.5])

    def weight(self, batch):
        return self.class_weights[batch[1]].sum()

    def loss(self, model, batch):
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1], self.class_weights.to(outputs.dtype), reduction="sum")


class Focal(_Classifier):
    """Focal loss: samples that are right already hardly count."""

    def loss(self, model, batch):
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - (-losses).exp()).square() * losses).sum()


class Distilled(_Classifier):
    """A frozen teacher inside the model, and the divergence from its outputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(99)
            self.teacher, self.student = nn.Linear(12, 4), nn.Linear(12, 4)
            with torch.no_grad():
                self.teacher.weight.copy_(torch.randn(4, 12, generator=generator))
            self.teacher.requires_grad_(False)

        def forward(self, inputs):
            return self.student(inputs)

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class MultiTask(_Classifier):
    """Classes and a regression, with learned weights of both losses (Kendall et al. 2018)."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(12, 24), nn.ReLU()), nn.Linear(24, 5)
            self.log_variances = nn.Parameter(torch.zeros(2))

        def forward(self, inputs):
            return self.head(self.body(inputs)), self.log_variances

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        outputs, log_variances = model(batch[0])
        first = functional.cross_entropy(outputs[:, :4], batch[1], reduction="sum")
        second = (outputs[:, 4] - batch[0].mean(1)).square().sum()
        scales = (-log_variances).exp()
        return scales[0] * first + scales[1] * second + len(batch[0]) * log_variances.sum()

    def predict(self, model, batch):
        return model(batch[0])[0][:, :4].softmax(-1)


class Penalty(_Classifier):
    """The weights' squares are part of the loss, once for each sample."""

    def loss(self, model, batch):
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        return super().loss(model, batch) + 1e-3 * len(batch[0]) * squares


class GradientPenalty(_Regression):
    """The loss holds the gradient of the outputs by the inputs: a second derivative."""

    def loss(self, model, batch):
        with torch.enable_grad():
            inputs = batch[0].detach().requires_grad_()
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return (outputs - batch[1]).square().sum() + 0.01 * slope.square().sum()


class SeldomHead(_Regression):
    """The loss of a head is computed in float32, and a head has no units in most batches."""

    overrides = {"optim.lr": "0.02", "batch.global": "16"}  # noqa: RUF012

    def data(self, count, seed):
        data = super().data(count, seed)
        return TensorDataset(*data.tensors, (torch.arange(count) % 50 == 0).float())

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))

    def weight(self, batch):
        return {"often": len(batch[0]), "seldom": batch[2].sum()}

    def loss(self, model, batch):
        errors = (model(batch[0]) - batch[1]).square()
        return {"often": errors[:, 0].sum(), "seldom": (errors[:, 1] * batch[2]).float().sum()}
