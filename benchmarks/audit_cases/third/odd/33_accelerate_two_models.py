import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(4)
    student = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    teacher = copy.deepcopy(student).requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=g)
    y = x[:, :3].argmax(1)
    y[32:] = -1  # unlabelled
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    opt = torch.optim.Adam(student.parameters(), 1e-2)
    student, opt, loader = accelerator.prepare(student, opt, loader)
    noise = torch.Generator().manual_seed(50 + accelerator.process_index)
    for epoch in range(3):
        for bx, by in loader:
            logits = student(bx + 0.1 * torch.randn(bx.shape, generator=noise))
            with torch.no_grad():
                target = teacher(bx + 0.1 * torch.randn(bx.shape, generator=noise)).softmax(1)
            labelled = (by >= 0).sum()
            everywhere = accelerator.reduce(labelled.clone(), "sum").clamp(min=1)
            supervised = nn.functional.cross_entropy(logits, by, ignore_index=-1, reduction="sum")
            consistency = (logits.softmax(1) - target).square().sum(1).mean()
            loss = supervised * accelerator.num_processes / everywhere + consistency
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), accelerator.unwrap_model(student).parameters()):
                    t.lerp_(s, 0.1)
        accelerator.print(f"epoch {epoch}: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    if accelerator.is_main_process:
        torch.save(teacher.state_dict(), "teacher.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
