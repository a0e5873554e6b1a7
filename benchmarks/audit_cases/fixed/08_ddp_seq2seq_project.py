import argparse

from seqproj.data import copy_task_loader
from seqproj.engine import Engine
from seqproj.model import TinyCopyNet
from seqproj import dist_utils as du


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse()
    du.setup(args.seed)
    loader, sampler = copy_task_loader(args.batch_size)
    model = TinyCopyNet(vocab=12, dim=32)
    engine = Engine(model, lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = engine.fit_epoch(loader)
        du.print0(f"epoch {epoch} mean loss on rank 0: {loss:.4f}")
    du.cleanup()


if __name__ == "__main__":
    main()
