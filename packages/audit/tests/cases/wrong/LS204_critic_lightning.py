"""Actor-critic style module with two optimizers stepped by hand."""
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Transitions(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        self.s = torch.randn(n, 6, generator=g)
        self.a = torch.tanh(self.s[:, :2] + 0.1 * torch.randn(n, 2, generator=g))
        self.r = -(self.s[:, 2:4] - self.a).pow(2).sum(1, keepdim=True)

    def __len__(self):
        return len(self.s)

    def __getitem__(self, i):
        return self.s[i], self.a[i], self.r[i]


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, o))


class ActorCritic(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = mlp(6, 2), mlp(8, 1)

    def configure_optimizers(self):
        return (torch.optim.Adam(self.critic.parameters(), lr=2e-3),
                torch.optim.Adam(self.actor.parameters(), lr=1e-3))

    def training_step(self, batch, batch_idx):
        s, a, r = batch
        opt_c, opt_a = self.optimizers()

        q = self.critic(torch.cat([s, a], 1))
        critic_loss = F.mse_loss(q, r)
        opt_c.zero_grad()
        critic_loss.backward()
        opt_c.step()

        for p in self.critic.parameters():
            p.requires_grad_(False)
        action = torch.tanh(self.actor(s))
        actor_loss = -self.critic(torch.cat([s, action], 1)).mean() + 0.1 * F.mse_loss(action, a)
        opt_a.zero_grad()
        actor_loss.backward()
        opt_a.step()
        for p in self.critic.parameters():
            p.requires_grad_(True)
        self.log_dict({"critic": critic_loss, "actor": actor_loss}, on_epoch=True, on_step=False, sync_dist=True)

    def on_train_epoch_end(self):
        w = torch.cat([p.detach().flatten() for p in self.parameters()])
        m = self.trainer.callback_metrics
        print(f"rank {self.global_rank} epoch {self.current_epoch} critic {m['critic']:.4f} "
              f"actor {m['actor']:.4f} |w| {w.norm():.6f}", flush=True)


if __name__ == "__main__":
    pl.seed_everything(4)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true",
                         logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(ActorCritic(), DataLoader(Transitions(), batch_size=16, shuffle=True))
