"""Behaviour cloning of a reaching controller: a Gaussian policy fitted by maximum likelihood."""
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import set_seed

OBS, ACT = 12, 4


class GaussianPolicy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.mean = nn.Linear(width, ACT)
        self.log_std = nn.Parameter(torch.full((ACT,), -0.5))

    def forward(self, obs, action=None):
        mean = self.mean(self.trunk(obs))
        if action is None:
            return mean
        return Independent(Normal(mean, self.log_std.exp()), 1).log_prob(action)


def record_demonstrations(n=3000):
    gen = torch.Generator().manual_seed(99)
    obs = torch.randn(n, OBS, generator=gen)
    gain = torch.randn(OBS, ACT, generator=gen) * 0.5
    action = torch.tanh(obs @ gain) + 0.1 * torch.randn(n, ACT, generator=gen)
    return TensorDataset(obs, action)


@torch.no_grad()
def action_error(accelerator, policy, loader):
    policy.eval()
    errors = []
    for obs, action in loader:
        err = (policy(obs) - action).pow(2).mean(dim=1)
        errors.append(accelerator.gather_for_metrics(err))
    policy.train()
    return torch.cat(errors).mean().item()


def main(epochs=3, batch_size=50, lr=1e-3):
    set_seed(21)
    accelerator = Accelerator(cpu=True)
    demos = record_demonstrations()
    train_set, held_out = random_split(demos, [2600, 400], generator=torch.Generator().manual_seed(5))
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=batch_size)

    policy = GaussianPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    policy, optimizer, train_loader, test_loader = accelerator.prepare(
        policy, optimizer, train_loader, test_loader
    )

    for epoch in range(epochs):
        total = 0.0
        for obs, action in train_loader:
            nll = -policy(obs, action).mean()
            optimizer.zero_grad()
            accelerator.backward(nll)
            accelerator.clip_grad_norm_(policy.parameters(), 5.0)
            optimizer.step()
            total += accelerator.reduce(nll.detach(), reduction="mean").item()
        mse = action_error(accelerator, policy, test_loader)
        accelerator.print(f"epoch {epoch}  nll {total / len(train_loader):.4f}  held-out mse {mse:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(policy).state_dict(), "policy.pt")


if __name__ == "__main__":
    main()
