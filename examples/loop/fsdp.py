"""A transformer that reads digits row by row, sharded over ranks by Lockstep.

lockstep run --nproc 2 fsdp.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep_recipes.recipes.digits import Digits


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        x = self.embed(rows) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
train_data = [(image.reshape(8, 8).float() / 255, label) for image, label in Digits(training=True)]
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

loop = lockstep.Loop(
    model, optimizer, train_data, global_batch=64, epochs=3, clip_norm=1.0, strategy="fsdp", run_dir="runs/fsdp"
)
for step in loop:
    for rows, labels in step:
        loss = cross_entropy(loop.model(rows), labels)
        step.backward(loss)
loop.save("model.pt")
