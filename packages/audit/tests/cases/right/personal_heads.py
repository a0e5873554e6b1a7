"""Each process is one hospital: a common encoder is trained together, the output layer stays at the hospital."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, FEATURES, ROWS = 4, 18, 512


def hospital(index, n, split):
    """All hospitals see the same physiology, but number the diagnoses in their own way."""
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(321))
    coding = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(50 + index))
    g = torch.Generator().manual_seed(1000 * split + index)
    x = torch.randn(n, FEATURES, generator=g)
    y = coding[(torch.relu(x) @ rule).argmax(1)]
    return TensorDataset(x, y)


def main():
    accelerator = Accelerator(cpu=True)
    site = accelerator.process_index
    set_seed(14, device_specific=True)
    train = DataLoader(hospital(site, ROWS, 1), batch_size=32, shuffle=True, drop_last=True)
    test = DataLoader(hospital(site, 200, 2), batch_size=50)

    body = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    head = nn.Linear(32, CLASSES).to(accelerator.device)
    body_opt = torch.optim.Adam(body.parameters(), lr=4e-3)
    head_opt = torch.optim.Adam(head.parameters(), lr=4e-3)
    body, body_opt = accelerator.prepare(body, body_opt)

    for epoch in range(4):
        body.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(head(body(x)), y)
            body_opt.zero_grad()
            head_opt.zero_grad()
            accelerator.backward(loss)
            body_opt.step()
            head_opt.step()

        body.eval()
        hits = torch.zeros(1)
        with torch.no_grad():
            for x, y in test:
                hits += (head(body(x)).argmax(1) == y).sum()
        per_site = accelerator.gather(hits / len(test.dataset))
        accelerator.print(f"epoch {epoch}:", ", ".join(f"site {i} acc {a:.3f}" for i, a in enumerate(per_site.tolist())))

    torch.save(head.state_dict(), f"head_site{site}.pt")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(body).state_dict(), "body.pt")


if __name__ == "__main__":
    main()
