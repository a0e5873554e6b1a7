"""Semi-supervised leaf classification with a mean teacher: the teacher is no DDP model and has no optimizer."""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

FEATURES, SPECIES = 16, 5


def leaves(n, seed, labelled=1.0):
    shape = torch.randn(SPECIES, FEATURES, generator=torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(seed)
    species = torch.randint(0, SPECIES, (n,), generator=gen)
    x = shape[species] + 0.9 * torch.randn(n, FEATURES, generator=gen)
    has_label = torch.rand(n, generator=gen) < labelled
    return TensorDataset(x, species, has_label.float())


@torch.no_grad()
def follow(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - decay)


@torch.no_grad()
def accuracy(accelerator, model, loader):
    hits = []
    for x, y, _ in loader:
        hits.append(accelerator.gather_for_metrics(model(x).argmax(dim=1) == y))
    return torch.cat(hits).float().mean().item()


def main(epochs=4, batch_size=32, decay=0.97, noise=0.3):
    set_seed(19)
    accelerator = Accelerator(cpu=True)
    train_loader = DataLoader(leaves(1920, 1, labelled=0.15), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(leaves(410, 2), batch_size=batch_size)
    student = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, SPECIES))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    student, optimizer, train_loader, test_loader = accelerator.prepare(
        student, optimizer, train_loader, test_loader
    )
    # equal on all ranks at the start, and moved only by the equal weights of the students
    teacher = copy.deepcopy(accelerator.unwrap_model(student)).requires_grad_(False)
    jitter = torch.Generator().manual_seed(500 + accelerator.process_index)

    for epoch in range(epochs):
        total = torch.zeros(2)
        for x, y, has_label in train_loader:
            with torch.no_grad():
                target = teacher(x + noise * torch.randn(x.shape, generator=jitter)).softmax(dim=1)
            logits = student(x + noise * torch.randn(x.shape, generator=jitter))
            # divided by the (equal) batch size, not by the number of labels, which differs between ranks
            supervised = (nn.functional.cross_entropy(logits, y, reduction="none") * has_label).sum() / len(x)
            consistency = (logits.softmax(dim=1) - target).pow(2).sum(dim=1).mean()
            loss = supervised + 0.5 * min(1.0, epoch / 2) * consistency
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            follow(teacher, accelerator.unwrap_model(student), decay)
            total += torch.stack([supervised.detach(), consistency.detach()])
        sup, con = accelerator.reduce(total / len(train_loader), reduction="mean").tolist()
        acc = accuracy(accelerator, teacher, test_loader)
        accelerator.print(f"epoch {epoch}: supervised {sup:.4f} consistency {con:.4f} teacher accuracy {acc:.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(teacher.state_dict(), "teacher.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
