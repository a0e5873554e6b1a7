"""Matrix factorisation on synthetic movie ratings."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator
from accelerate.utils import set_seed

USERS, MOVIES, RANK = 300, 200, 8


class Ratings(Dataset):
    def __init__(self, count, seed):
        world = torch.Generator().manual_seed(0)
        taste = torch.randn(USERS, RANK, generator=world)
        style = torch.randn(MOVIES, RANK, generator=world)
        gen = torch.Generator().manual_seed(seed)
        self.user = torch.randint(0, USERS, (count,), generator=gen)
        self.movie = torch.randint(0, MOVIES, (count,), generator=gen)
        score = (taste[self.user] * style[self.movie]).sum(-1) / RANK ** 0.5
        self.rating = score + 0.1 * torch.randn(count, generator=gen)

    def __len__(self):
        return len(self.rating)

    def __getitem__(self, i):
        return {"user": self.user[i], "movie": self.movie[i], "rating": self.rating[i]}


class Factorizer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.movie = nn.Embedding(MOVIES, dim)
        self.user_bias = nn.Embedding(USERS, 1)
        self.movie_bias = nn.Embedding(MOVIES, 1)
        for table in (self.user, self.movie):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, movie):
        dot = (self.user(user) * self.movie(movie)).sum(-1, keepdim=True)
        return (dot + self.user_bias(user) + self.movie_bias(movie)).squeeze(-1)


def rmse(accelerator, model, loader):
    model.eval()
    errors = []
    with torch.no_grad():
        for batch in loader:
            err = (model(batch["user"], batch["movie"]) - batch["rating"]) ** 2
            errors.append(accelerator.gather_for_metrics(err))
    model.train()
    return torch.cat(errors).mean().sqrt().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(17)
    train_set, test_set = Ratings(12000, seed=1), Ratings(1500, seed=2)
    train_loader = DataLoader(train_set, batch_size=100, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)
    model = Factorizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(3):
        running, steps = 0.0, 0
        for batch in train_loader:
            prediction = model(batch["user"], batch["movie"])
            loss = nn.functional.mse_loss(prediction, batch["rating"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            running += accelerator.reduce(loss.detach(), reduction="mean").item()
            steps += 1
        score = rmse(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {steps} steps, train mse {running / steps:.4f}, test rmse {score:.4f}")


if __name__ == "__main__":
    main()
