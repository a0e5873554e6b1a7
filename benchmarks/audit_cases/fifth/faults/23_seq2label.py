import torch
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 2
EVAL_EVERY = 15
VOCAB = 60
LENGTH = 16


class MajorityToken(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(4, VOCAB, (n, LENGTH), generator=g)
        self.labels = ((self.ids > VOCAB // 2).sum(1) > LENGTH // 2).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def build_model():
    config = DistilBertConfig(
        vocab_size=VOCAB, dim=32, hidden_dim=64, n_layers=2, n_heads=2,
        max_position_embeddings=LENGTH, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0, num_labels=2,
    )
    return DistilBertForSequenceClassification(config)


def evaluate(accelerator, model, loader):
    model.eval()
    hits = seen = 0
    with torch.no_grad():
        for batch in loader:
            pred = model(**batch).logits.argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
            hits += (pred == ref).sum().item()
            seen += len(ref)
    model.train()
    return hits / seen


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5)

    train_loader = DataLoader(MajorityToken(960, 0), batch_size=16, shuffle=True, drop_last=True)
    eval_loader = DataLoader(MajorityToken(250, 1), batch_size=32)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )

    total_steps = EPOCHS * len(train_loader)
    progress_bar = tqdm(range(total_steps), disable=not accelerator.is_main_process)
    completed_steps = 0

    model.train()
    for epoch in range(EPOCHS):
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress_bar.update(1)
            completed_steps += 1

            if progress_bar.n > 0 and progress_bar.n % EVAL_EVERY == 0:
                acc = evaluate(accelerator, model, eval_loader)
                accelerator.print(f"step {completed_steps}/{total_steps} accuracy {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "classifier", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
