"""A classifier of handwritten digits on one device: a plain training loop."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lockstep_recipes.recipes.digits import Digits

torch.manual_seed(0)
train_data = [(image.float() / 255, label) for image, label in Digits(training=True)]
test_data = [(image.float() / 255, label) for image, label in Digits(training=False)]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = DataLoader(train_data, batch_size=64, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
for epoch in range(8):
    model.train()
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test_data, 256))
    print(f"epoch {epoch + 1}: accuracy {right / len(test_data):.3f}")
torch.save(model.state_dict(), "model.pt")
