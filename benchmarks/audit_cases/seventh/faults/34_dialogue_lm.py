"""Small causal LM with checkpoints that allow a run to be continued."""
import argparse
import json
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Tokens(Dataset):
    def __init__(self, n=320, length=24, vocab=64):
        g = torch.Generator().manual_seed(3)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        stride = torch.randint(1, 5, (n, 1), generator=g)
        self.ids = (start + stride * torch.arange(length)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


def save(accelerator, folder, epoch, step):
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        with open(os.path.join(folder, "progress.json"), "w") as f:
            json.dump({"epoch": epoch, "step": step}, f)
    accelerator.wait_for_everyone()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--max_steps", type=int, default=None)
    p.add_argument("--save_every", type=int, default=8)
    p.add_argument("--resume_from", default=None)
    args = p.parse_args()

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(13)

    config = GPT2Config(vocab_size=64, n_positions=24, n_embd=32, n_layer=2, n_head=2,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(Tokens(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first_epoch, done = 0, 0
    global_step = 0
    if args.resume_from:
        accelerator.load_state(args.resume_from)
        with open(os.path.join(args.resume_from, "progress.json")) as f:
            progress = json.load(f)
        first_epoch, done = progress["epoch"], progress["step"]
        global_step = first_epoch * len(loader) + done
        loader = accelerator.skip_first_batches(loader, done)
        accelerator.print(f"continuing at epoch {first_epoch}, step {done}")

    for epoch in range(first_epoch, args.epochs):
        loader.set_epoch(epoch)
        model.train()
        start = done if epoch == first_epoch else 0
        count = 0
        for step, ids in enumerate(loader, start=start):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1
            count += len(ids)
            if (step + 1) % args.save_every == 0:
                save(accelerator, "checkpoint", epoch, step + 1)
            if args.max_steps and global_step >= args.max_steps:
                accelerator.end_training()
                return
        seen = accelerator.reduce(torch.tensor(count), reduction="sum").item()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}  step {global_step}  sequences {seen}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
