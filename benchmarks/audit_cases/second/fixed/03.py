import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from proj03.model import VQAutoencoder

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(3)

centers = torch.randn(16, 16) * 3
data = centers[torch.randint(16, (1024,))] + 0.3 * torch.randn(1024, 16)
dataset = TensorDataset(data)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)

# the buffers are handled by the quantizer, no need to send them at every forward
model = DDP(VQAutoencoder(), broadcast_buffers=False)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(4):
    sampler.set_epoch(epoch)
    running = torch.zeros(1)
    for (x,) in loader:
        recon, commit = model(x)
        loss = F.mse_loss(recon, x) + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    dist.all_reduce(running)
    if rank == 0:
        print(f"[{epoch}] loss {running.item() / len(loader) / dist.get_world_size():.4f}")

if rank == 0:
    torch.save(model.module.state_dict(), "vq.pt")
dist.destroy_process_group()
