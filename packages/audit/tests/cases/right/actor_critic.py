"""Actor-critic: two backward passes of two losses before one step of one optimizer; rank-seeded rollouts."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
class AC(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(4, 2); self.c = nn.Linear(4, 1)
    def forward(self, s): return self.a(s), self.c(s).squeeze(-1)
model = DDP(AC(), find_unused_parameters=True); opt = torch.optim.Adam(model.parameters(), lr=1e-2)
g = torch.Generator().manual_seed(100 + rank)
for it in range(12):
    with torch.no_grad():
        s = torch.randn(32, 4, generator=g); logits, _ = model(s)
        act = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
        rew = (act == (s[:, 0] > 0).long()).float()
    for k in range(2):
        logits, v = model(s)
        adv = (rew - v.detach())
        opt.zero_grad()
        pl = -(logits.log_softmax(-1).gather(1, act[:, None]).squeeze(1) * adv).mean()
        pl.backward()
        _, v = model(s)
        vl = F.mse_loss(v, rew); vl.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
dist.destroy_process_group()
