"""A plain PyTorch training on one process. All tricks start from it.

python examples/tricks/00_one_process.py   # or --device cuda
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep_recipes.recipes.digits import Digits

EPOCHS, BATCH, RATE = 3, 64, 0.5


def load(training):
    data = Digits(training)
    return (data.images / 255).to(DEVICE), torch.from_numpy(data.labels).to(DEVICE)


parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
DEVICE = parser.parse_args().device
if DEVICE == "cuda" and not torch.cuda.is_available():
    parser.error("--device cuda: torch sees no GPU here")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
images, labels = load(training=True)
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    total = 0.0
    for batch in order.split(BATCH):
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    print(f"epoch {epoch + 1}: loss {total / len(labels):.4f}")

images, labels = load(training=False)
with torch.no_grad():
    correct = (model(images).argmax(dim=1) == labels).sum().item()
print(f"accuracy {correct / len(labels):.4f} on {len(labels)} digits")
