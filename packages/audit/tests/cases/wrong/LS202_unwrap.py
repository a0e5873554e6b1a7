import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Matcher(nn.Module):
    """Two towers with a contrastive loss."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(8, 16)

    def forward(self, a, b):
        za, zb = nn.functional.normalize(self.left(a), dim=1), nn.functional.normalize(self.right(b), dim=1)
        return za @ zb.T / 0.1


def training_function():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    g = torch.Generator().manual_seed(0)
    a = torch.randn(384, 8, generator=g)
    b = a.flip(1) + 0.1 * torch.randn(384, 8, generator=g)
    loader = DataLoader(TensorDataset(a, b), batch_size=16, shuffle=True)
    model = Matcher()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    net = accelerator.unwrap_model(model)
    for epoch in range(2):
        net.train()
        for xa, xb in loader:
            logits = net(xa, xb)
            loss = nn.functional.cross_entropy(logits, torch.arange(len(xa)))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "matcher.pt")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
