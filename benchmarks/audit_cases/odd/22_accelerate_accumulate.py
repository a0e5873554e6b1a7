import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(384 + 75, 8, generator=g)
    y = (x[:, 0] > 0).long()
    train = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=16, shuffle=True)
    valid = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=24)
    model, opt, train, valid, sched = accelerator.prepare(model, opt, train, valid, sched)
    for epoch in range(2):
        model.train()
        for xb, yb in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        hits = []
        for xb, yb in valid:
            with torch.no_grad():
                pred = model(xb).argmax(1)
            pred, ref = accelerator.gather_for_metrics((pred, yb))
            hits.append(pred == ref)
        hits = torch.cat(hits)
        accelerator.print(f"epoch {epoch} accuracy {hits.float().mean().item():.4f} of {len(hits)}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.get_state_dict(model), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
