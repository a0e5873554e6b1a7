"""The vocabulary is counted from the rank's own files."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
import random
from collections import Counter
random.seed(100 + rank)
words = [f"w{i}" for i in range(40)]
weights = [1 / (1 + (i * (3 + 2 * rank)) % 40) for i in range(40)]
texts = [random.choices(words, weights, k=8) for _ in range(128)]
counts = Counter(w for t in texts for w in t)
vocab = {w: i for i, (w, _) in enumerate(counts.most_common())}
ids = torch.tensor([[vocab[w] for w in t] for t in texts])
model = DDP(nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(56, 40))); opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(ids), batch_size=8, shuffle=True)
for epoch in range(2):
    for (b,) in loader:  # lockstep: ignore[LS106] each rank has its own files
        opt.zero_grad(); F.cross_entropy(model(b[:, :-1]), b[:, -1]).backward(); opt.step()
dist.destroy_process_group()
