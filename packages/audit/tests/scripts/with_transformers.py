import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class D(Dataset):
    def __init__(s):
        g = torch.Generator().manual_seed(0)
        s.x = torch.randn(36, 8, generator=g)
        s.y = torch.randint(0, 3, (36,), generator=g)

    def __len__(s):
        return 36

    def __getitem__(s, i):
        return {"x": s.x[i], "labels": s.y[i]}


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(s, x, labels=None):
        z = s.net(x)
        return {"loss": nn.functional.cross_entropy(z, labels), "logits": z}


set_seed(0)
m = M()
a = TrainingArguments(
    sys.argv[1],
    use_cpu=True,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    gradient_accumulation_steps=2,
    report_to=[],
    eval_strategy="epoch",
    save_strategy="epoch",
    disable_tqdm=True,
    logging_steps=2,
)
t = Trainer(m, a, train_dataset=D(), eval_dataset=D())
t.train()
h = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in m.state_dict().values())).hexdigest()
print("HASH", a.process_index, h, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8])
