"""Prefix captioning: a mapper turns image features into prefix embeddings for a small GPT-2."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
PREFIX, VOCAB = 4, 40


class Captions(Dataset):
    def __init__(self, n=160, seed=0):
        g = torch.Generator().manual_seed(seed)
        kinds = torch.randn(8, 16, generator=torch.Generator().manual_seed(77))
        which = torch.randint(0, 8, (n,), generator=g)
        self.feats = kinds[which] + 0.1 * torch.randn(n, 16, generator=g)
        self.tokens = (which.unsqueeze(1) * 4 + torch.arange(8).unsqueeze(0)) % VOCAB

    def __len__(self):
        return len(self.feats)

    def __getitem__(self, i):
        return self.feats[i], self.tokens[i]


class Mapper(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, PREFIX * width))

    def forward(self, f):
        return self.net(f).view(-1, PREFIX, self.width)


def caption_loss(decoder, mapper, embed, feats, tokens):
    inputs = torch.cat([mapper(feats), embed(tokens)], dim=1)
    logits = decoder(inputs_embeds=inputs).logits[:, PREFIX - 1:-1]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens.reshape(-1))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    decoder = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=1, n_head=2,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    mapper = Mapper(32).to(accelerator.device)
    embed = nn.Embedding(VOCAB, 32).to(accelerator.device).requires_grad_(False)
    params = list(decoder.parameters()) + list(mapper.parameters())
    decoder.transformer.wte.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    train_loader = DataLoader(Captions(160, 0), batch_size=10, shuffle=True)
    val_loader = DataLoader(Captions(40, 1), batch_size=10)
    decoder, optimizer, train_loader, val_loader = accelerator.prepare(decoder, optimizer, train_loader, val_loader)

    for epoch in range(2):
        decoder.train()
        for feats, tokens in train_loader:
            loss = caption_loss(decoder, mapper, embed, feats, tokens)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        decoder.eval()
        losses = []
        with torch.no_grad():
            for feats, tokens in val_loader:
                losses.append(accelerator.gather(caption_loss(decoder, mapper, embed, feats, tokens).reshape(1)))
        accelerator.print(f"epoch {epoch}: val {torch.cat(losses).mean().item():.5f}")

    accelerator.wait_for_everyone()
    accelerator.save({"decoder": accelerator.unwrap_model(decoder).state_dict(),
                      "mapper": accelerator.unwrap_model(mapper).state_dict()}, "captioner.pt")
    print(f"process {accelerator.process_index}: |mapper| {sum(p.abs().sum() for p in mapper.parameters()).item():.5f}")


if __name__ == "__main__":
    main()
