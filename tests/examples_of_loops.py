"""The names that the loops of the migration pages use."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

__all__ = ["DataLoader", "MulticlassAccuracy", "cross_entropy", "get_linear_schedule_with_warmup", "math"]

name = "a model"


def make_model():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


class AutoModelForSequenceClassification:
    """Gives a small model instead of a pretrained one."""

    @staticmethod
    def from_pretrained(name, num_labels):
        sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
        return BertForSequenceClassification(BertConfig(**sizes, **layers, num_labels=num_labels))


def train_data(library):
    """128 samples of what the page trains on, and a loader of them for an evaluation."""
    labels = torch.randint(2, (128,))
    if library != "accelerate":
        data = TensorDataset(torch.randn(128, 64), labels)
    else:
        data = [(torch.randint(3, 50, (5 + number % 7,)), int(label)) for number, label in enumerate(labels)]
    return data, DataLoader(Subset(data, range(50)), 16, collate_fn=pad)


def pad(samples):
    texts, labels = zip(*samples, strict=True)
    words = pad_sequence(list(texts), batch_first=True)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": torch.tensor(labels)}
