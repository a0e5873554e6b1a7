"""The same loop with Lockstep: on any number of ranks, and resumed after a kill.

python with_lockstep.py
lockstep run --nproc 2 with_lockstep.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep_recipes.recipes.digits import Digits

torch.manual_seed(0)
train_data = [(image.float() / 255, label) for image, label in Digits(training=True)]
test_data = [(image.float() / 255, label) for image, label in Digits(training=False)]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * 23)
loop = lockstep.Loop(model, optimizer, train_data, global_batch=64, epochs=8, scheduler=scheduler, run_dir="runs/loop")
for step in loop:
    for images, labels in step:
        loss = cross_entropy(loop.model(images), labels)
        step.backward(loss)
    if step.ends_epoch:
        accuracy = loop.evaluate(test_data, MulticlassAccuracy(10, average="micro"))
        loop.log(accuracy=accuracy)
        if loop.is_main:
            print(f"epoch {step.epoch + 1}: accuracy {accuracy:.3f}")
loop.save("model.pt")
