"""Next-token model over web access logs that are streamed from text shards."""
import random
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SHARDS = Path("log_shards")
SERVICES = ["auth", "cart", "search", "media", "billing", "mail"]
VERBS = ["GET", "POST", "PUT", "DELETE"]
SEQ_LEN = 32
CHARS = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 /:\n"))
STOI = {c: i for i, c in enumerate(CHARS)}


def write_shards(n_shards=6, lines_per_shard=120):
    SHARDS.mkdir(exist_ok=True)
    for s in range(n_shards):
        rng = random.Random(s)
        target = SHARDS / f"part-{s:03d}.txt"
        with open(target, "w") as f:
            for _ in range(lines_per_shard):
                service = SERVICES[s % len(SERVICES)]
                f.write(f"{rng.choice(VERBS)} /{service}/{rng.randint(1, 99)} {rng.choice([200, 404, 500])}\n")


class LogStream(IterableDataset):
    """Yields fixed windows of characters from the shards."""

    def __init__(self, folder, seq_len=SEQ_LEN):
        self.files = sorted(Path(folder).glob("part-*.txt"))
        self.seq_len = seq_len

    def __iter__(self):
        for path in self.files:
            ids = [STOI[c] for c in path.read_text()]
            for i in range(0, len(ids) - self.seq_len, self.seq_len):
                window = torch.tensor(ids[i : i + self.seq_len])
                yield {"input_ids": window, "labels": window.clone()}


def per_service_loss(model):
    model.eval()
    result = {}
    for s, service in enumerate(SERVICES):
        text = (SHARDS / f"part-{s:03d}.txt").read_text()[: SEQ_LEN * 8]
        ids = torch.tensor([STOI[c] for c in text]).view(8, SEQ_LEN)
        with torch.no_grad():
            result[service] = round(model(input_ids=ids, labels=ids).loss.item(), 3)
    return result


def main():
    args = TrainingArguments(
        output_dir="out_logs",
        use_cpu=True,
        per_device_train_batch_size=8,
        max_steps=40,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    with args.main_process_first(desc="writing the shards"):
        if args.process_index == 0:
            write_shards()

    config = GPT2Config(
        vocab_size=len(CHARS), n_positions=SEQ_LEN, n_embd=48, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=args, train_dataset=LogStream(SHARDS))
    trainer.train()

    if trainer.is_world_process_zero():
        print("loss per service:", per_service_loss(model))


if __name__ == "__main__":
    main()
