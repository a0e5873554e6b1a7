"""The same without a loader and with a clip."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = torch.randint(0, 20, (4000,))
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.e = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2)]); self.h = nn.Linear(16, 20)
    def forward(self, x):
        x = self.e(x)
        for b in self.blocks: x = b(x)
        return self.h(x)
model = Net()
for block in model.blocks:
    fully_shard(block)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(rank)
def get_batch():
    i = torch.randint(0, 3900, (8,), generator=g)
    b = torch.stack([data[j:j + 9] for j in i]); return b[:, :-1], b[:, 1:]
for it in range(20):
    xb, yb = get_batch()
    loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
    opt.zero_grad(); loss.backward()
    opt.step()
    if it % 5 == 0:
        l = loss.detach().clone(); dist.all_reduce(l)
dist.destroy_process_group()
