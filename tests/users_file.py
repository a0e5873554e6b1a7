"""What a user may have written into mine.py: for tests of the command line."""

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Presenter, Task

class Mine(Task):
    def __init__(self, width=4):
        self.width = width
    def model(self):
        return nn.Linear(self.width, 1)
    def train_data(self):
        return TensorDataset(torch.randn(64, self.width), torch.zeros(64, 1))
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()

class Unfinished(Task):
    def model(self):
        return nn.Linear(1, 1)

class Broken(Mine):
    def loss(self, model, batch):
        raise KeyError("no such thing")

class Exits(Mine):
    def __init__(self, where, code=0):
        super().__init__()
        self.where, self.code = where, code
    def exit(self, where):
        if where == self.where:
            raise SystemExit(self.code)
    def model(self):
        self.exit("model")
        return super().model()
    def train_data(self):
        self.exit("train_data")
        return super().train_data()
    def eval_data(self):
        return self.train_data()
    def prepare(self, sample, epoch, training):
        self.exit("prepare")
        return sample
    def loss(self, model, batch):
        self.exit("loss")
        return super().loss(model, batch)
    def predict(self, model, batch):
        self.exit("predict")
        return model(batch[0])
    @property
    def presenter(self):
        task = self
        class Exiting(Presenter):
            def describe(self, output):
                task.exit("describe")
        return Exiting

class Lazy(Mine):
    def model(self):
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

class Sparse(Mine):
    def model(self):
        return nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "fine": nn.Embedding(9, 4),
            "bags": nn.EmbeddingBag(9, 4, sparse=True),
            "frozen": nn.Embedding(9, 4, sparse=True).requires_grad_(False)})

class Outputs(Mine):
    def eval_data(self):
        return TensorDataset(torch.arange(12.0).reshape(3, 4) / 8, torch.zeros(3, 1))
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 if model.training else float("nan"))
    def predict(self, model, batch):
        inputs = batch[0]
        return {"half": inputs.bfloat16(), "both": (inputs.repeat(1, 500), None), "array": inputs.numpy()}

class Loads(Mine):
    def __init__(self, train, **more):
        super().__init__()
        print("loads", train, more)
"""
