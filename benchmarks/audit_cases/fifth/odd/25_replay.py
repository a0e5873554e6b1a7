import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from accelerate import Accelerator
from accelerate.utils import set_seed

ACTIONS, STATE = 4, 6


class Bandit:
    """Contextual bandit; each process plays its own copy with its own randomness."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.w = torch.randn(STATE, ACTIONS, generator=torch.Generator().manual_seed(12))

    def contexts(self, n):
        return torch.randn(n, STATE, generator=self.gen)

    def rewards(self, s, a):
        clean = (s @ self.w).gather(1, a.unsqueeze(1)).squeeze(1)
        return clean + 0.1 * torch.randn(len(s), generator=self.gen)

    def explore(self, greedy, eps):
        random_action = torch.randint(0, ACTIONS, greedy.shape, generator=self.gen)
        take = torch.rand(greedy.shape, generator=self.gen) < eps
        return torch.where(take, random_action, greedy)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(1)
    env = Bandit(seed=1000 + accelerator.process_index)
    q = nn.Sequential(nn.Linear(STATE, 64), nn.ReLU(), nn.Linear(64, ACTIONS))
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    q, optimizer = accelerator.prepare(q, optimizer)
    net = accelerator.unwrap_model(q)

    os.makedirs("ckpt", exist_ok=True)
    path = os.path.join("ckpt", f"process{accelerator.process_index}.pt")
    buffer, start = [], 0
    if args.resume:
        state = torch.load(path, weights_only=False)
        net.load_state_dict(state["q"])
        optimizer.load_state_dict(state["optimizer"])
        env.gen.set_state(state["env"])
        buffer, start = state["buffer"], state["step"]
        steps = accelerator.gather(torch.tensor([start])).tolist()
        if len(set(steps)) != 1:
            raise RuntimeError(f"checkpoints of different steps: {steps}")

    for step in range(start, args.steps):
        with torch.no_grad():
            s = env.contexts(16)
            a = env.explore(net(s).argmax(1), eps=max(0.1, 1 - step / 60))
            buffer.extend(zip(s, a, env.rewards(s, a)))
            buffer = buffer[-1024:]
        pick = torch.randint(0, len(buffer), (32,), generator=env.gen).tolist()
        s, a, r = (torch.stack(c) for c in zip(*(buffer[i] for i in pick)))
        loss = F.smooth_l1_loss(q(s).gather(1, a.unsqueeze(1)).squeeze(1), r)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

        if (step + 1) % 30 == 0:
            stats = torch.stack([loss.detach(), r.mean()])
            loss_mean, r_mean = accelerator.reduce(stats, reduction="mean").tolist()
            accelerator.print(f"step {step + 1} td loss {loss_mean:.4f} replayed reward {r_mean:.3f}")
            torch.save(
                {"q": net.state_dict(), "optimizer": optimizer.state_dict(), "env": env.gen.get_state(),
                 "buffer": buffer, "step": step + 1},
                path + ".tmp",
            )
            os.replace(path + ".tmp", path)
            accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
