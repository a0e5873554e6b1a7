"""Cross validation where every process takes some of the folds and trains them by itself."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

FOLDS = 5


def make_data(n=570):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 20))
    x[:, :5] += 0.7 * y[:, None]
    return x, y


def stratified_folds(y, seed=0):
    rng = np.random.default_rng(seed)
    fold_of = np.empty(len(y), dtype=int)
    for label in np.unique(y):
        idx = rng.permutation(np.flatnonzero(y == label))
        fold_of[idx] = np.arange(len(idx)) % FOLDS
    return [(np.flatnonzero(fold_of != f), np.flatnonzero(fold_of == f)) for f in range(FOLDS)]


def accuracy(y, scores):
    return float(((scores > 0.5) == y).mean())


def train_fold(fold, x, y, train_idx, valid_idx, epochs=3):
    set_seed(100 + fold)
    mean, std = x[train_idx].mean(0), x[train_idx].std(0)
    z = torch.tensor((x - mean) / std, dtype=torch.float32)
    t = torch.tensor(y, dtype=torch.float32)
    loader = DataLoader(TensorDataset(z[train_idx], t[train_idx]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    for _ in range(epochs):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss_fn(model(xb).squeeze(1), yb).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = model(z[valid_idx]).squeeze(1).sigmoid().numpy()
    torch.save(model.state_dict(), f"fold{fold}.pt")
    return {"fold": fold, "acc": accuracy(y[valid_idx], scores), "idx": valid_idx, "scores": scores}


def main():
    accelerator = Accelerator(cpu=True)
    x, y = make_data()
    splits = stratified_folds(y)

    results = []
    with accelerator.split_between_processes(list(range(FOLDS))) as mine:
        for fold in mine:
            train_idx, valid_idx = splits[fold]
            results.append(train_fold(fold, x, y, train_idx, valid_idx))
            print(f"process {accelerator.process_index} fold {fold} accuracy {results[-1]['acc']:.4f}")

    results = sorted(gather_object(results), key=lambda r: r["fold"])
    if accelerator.is_main_process:
        assert [r["fold"] for r in results] == list(range(FOLDS))
        oof = np.zeros(len(y))
        for r in results:
            oof[r["idx"]] = r["scores"]
        accs = [r["acc"] for r in results]
        print(f"mean accuracy {np.mean(accs):.4f} +- {np.std(accs):.4f}, out of fold {accuracy(y, oof):.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
