"""Running statistics of observations in buffers, from each rank's own rollouts."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
class Norm(nn.Module):
    def __init__(self):
        super().__init__(); self.register_buffer("mean", torch.zeros(4)); self.register_buffer("var", torch.ones(4)); self.register_buffer("count", torch.tensor(1e-4))
    def forward(self, s):
        with torch.no_grad():
            m, v, n = s.mean(0), s.var(0, unbiased=False), len(s); d = m - self.mean; tot = self.count + n
            self.mean.add_(d * n / tot)
            self.var.copy_((self.var * self.count + v * n + d ** 2 * self.count * n / tot) / tot); self.count.copy_(tot)
        return (s - self.mean) / (self.var.sqrt() + 1e-5)
norm = Norm(); policy = DDP(nn.Linear(4, 2)); opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
g = torch.Generator().manual_seed(rank)
for it in range(20):
    s = torch.randn(32, 4, generator=g) * 3 + 1
    logp = policy(norm(s)).log_softmax(-1); a = torch.multinomial(logp.detach().exp(), 1, generator=g)
    r = (a.squeeze(1) == (s[:, 0] > 1).long()).float()
    loss = -(logp.gather(1, a).squeeze(1) * (r - r.mean())).mean()
    opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
