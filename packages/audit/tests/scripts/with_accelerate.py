import hashlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(36, 8), torch.randint(0, 3, (36,)))
loader = DataLoader(data, 4, shuffle=True)
val = DataLoader(data, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.StepLR(opt, 10)
model, opt, loader, val, sched = acc.prepare(model, opt, loader, val, sched)
for _epoch in range(2):
    model.train()
    for x, y in loader:
        with acc.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
    model.eval()
    for x, y in val:
        with torch.no_grad():
            p, t = acc.gather_for_metrics((model(x).argmax(1), y))
h = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())).hexdigest()
print("HASH", acc.process_index, h, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8])
acc.end_training()
