"""Film ratings by matrix factorisation: user and film factors take turns, each with its own optimizer."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

USERS, FILMS, RANK = 120, 80, 6


def make_ratings(n, seed):
    taste = torch.Generator().manual_seed(77)
    user_factor = torch.randn(USERS, RANK, generator=taste)
    film_factor = torch.randn(FILMS, RANK, generator=taste)
    g = torch.Generator().manual_seed(seed)
    user = torch.randint(0, USERS, (n,), generator=g)
    film = torch.randint(0, FILMS, (n,), generator=g)
    rating = (user_factor[user] * film_factor[film]).sum(1) / RANK ** 0.5
    return TensorDataset(user, film, rating + 0.1 * torch.randn(n, generator=g))


class Factors(L.LightningModule):
    def __init__(self, turn=8, lr=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.turn, self.lr = turn, lr
        self.user = nn.Embedding(USERS, RANK)
        self.film = nn.Embedding(FILMS, RANK)

    def forward(self, user, film):
        return (self.user(user) * self.film(film)).sum(1) / RANK ** 0.5

    def training_step(self, batch, batch_idx):
        user, film, rating = batch
        opt_user, opt_film = self.optimizers()
        loss = F.mse_loss(self(user, film), rating)
        opt_user.zero_grad()
        opt_film.zero_grad()
        self.manual_backward(loss)
        # both sides get gradients (and both are reduced), but only the side whose turn it is moves
        if (batch_idx // self.turn) % 2 == 0:
            opt_user.step()
        else:
            opt_film.step()
        self.log("train_mse", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, batch_idx):
        user, film, rating = batch
        self.log("val_mse", F.mse_loss(self(user, film), rating), sync_dist=True, batch_size=len(rating))

    def configure_optimizers(self):
        opt_user = torch.optim.Adam(self.user.parameters(), lr=self.lr)
        opt_film = torch.optim.Adam(self.film.parameters(), lr=self.lr)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.85) for opt in (opt_user, opt_film)]
        return [opt_user, opt_film], schedules


def main():
    L.seed_everything(9)
    train = DataLoader(make_ratings(4096, 0), batch_size=64, shuffle=True)
    val = DataLoader(make_ratings(512, 1), batch_size=128)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=8, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Factors(), train, val)
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"train mse {metrics['train_mse']:.4f}  val mse {metrics['val_mse']:.4f}")


if __name__ == "__main__":
    main()
