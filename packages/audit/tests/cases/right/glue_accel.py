# no_trainer style classification; the batch size is the global one (split over the processes)
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AlbertConfig, AlbertForSequenceClassification, get_scheduler

torch.set_num_threads(1)
GLOBAL_BATCH, EPOCHS = 16, 2


def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        label = int(torch.randint(0, 2, (), generator=g))
        ids = torch.randint(5, 50, (8,), generator=g)
        ids[2:5] = 50 + label
        rows.append({"input_ids": ids, "labels": label})
    return rows


accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(14)
model = AlbertForSequenceClassification(AlbertConfig(vocab_size=64, embedding_size=16, hidden_size=32,
                                                     num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                                     max_position_embeddings=16))
train_dataloader = DataLoader(sentences(160, 0), batch_size=GLOBAL_BATCH, shuffle=True)
eval_dataloader = DataLoader(sentences(70, 1), batch_size=GLOBAL_BATCH)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader)
lr_scheduler = accelerator.prepare(get_scheduler(
    "linear", optimizer, num_warmup_steps=2, num_training_steps=EPOCHS * len(train_dataloader)))

for epoch in range(EPOCHS):
    model.train()
    for batch in train_dataloader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    model.eval()
    hits = []
    for batch in eval_dataloader:
        with torch.no_grad():
            logits = model(**batch).logits
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        hits.append(predictions == references)
    hits = torch.cat(hits).float()
    accelerator.print(f"epoch {epoch} accuracy {hits.mean():.4f} ({len(hits)}) lr {lr_scheduler.get_last_lr()[0]:.6f}")
