"""Route support tickets to teams: bag-of-words classifier trained from a CSV file."""
import csv
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CSV = "tickets.csv"
TEAMS = {
    "billing": "invoice refund charge card payment",
    "network": "vpn router wifi latency dns",
    "hardware": "laptop screen keyboard battery dock",
    "accounts": "password login reset mfa locked",
    "printing": "printer toner paper scan tray",
    "licensing": "license seat renew activation key",
}
COMMON = "please help the my is not working since today again urgent".split()


def write_csv(path, rows=600):
    rng = random.Random(11)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["text", "team"])
        for _ in range(rows):
            team = rng.choice(list(TEAMS))
            words = rng.choices(TEAMS[team].split(), k=3) + rng.choices(COMMON, k=6)
            rng.shuffle(words)
            writer.writerow([" ".join(words), team])


class Tickets(Dataset):
    def __init__(self, path):
        with open(path, newline="") as f:
            self.rows = list(csv.DictReader(f))
        teams = set(row["team"] for row in self.rows)
        self.team_to_id = {team: i for i, team in enumerate(teams)}
        words = sorted({w for row in self.rows for w in row["text"].split()})
        self.word_to_id = {w: i for i, w in enumerate(words)}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        bag = torch.zeros(len(self.word_to_id))
        for w in row["text"].split():
            bag[self.word_to_id[w]] += 1
        return bag, self.team_to_id[row["team"]]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_csv(CSV)
    dist.barrier()

    torch.manual_seed(42)
    data = Tickets(CSV)
    sampler = DistributedSampler(data, shuffle=True, seed=42)
    loader = DataLoader(data, batch_size=20, sampler=sampler)

    net = nn.Sequential(
        nn.Linear(len(data.word_to_id), 32), nn.ReLU(), nn.Linear(32, len(data.team_to_id))
    )
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for bag, team in loader:
            logits = model(bag)
            loss = F.cross_entropy(logits, team)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            hits = (logits.argmax(1) == team).sum()
            stats += torch.tensor([loss.item() * len(team), hits.item(), len(team)])
        dist.all_reduce(stats)
        if rank == 0:
            n = stats[2].item()
            print(f"[{epoch}] loss {stats[0].item() / n:.3f} acc {stats[1].item() / n:.3f}", flush=True)

    if rank == 0:
        torch.save({"model": net.state_dict(), "teams": data.team_to_id}, os.path.abspath("router.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
