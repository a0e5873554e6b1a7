"""Speaker embeddings from codec tokens, trained with an additive-margin softmax."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

CODES, LENGTH, SPEAKERS = 64, 20, 8


class Utterances(Dataset):
    def __init__(self, size, seed):
        voice = torch.rand(SPEAKERS, CODES, generator=torch.Generator().manual_seed(99)) ** 6
        g = torch.Generator().manual_seed(seed)
        self.speaker = torch.randint(0, SPEAKERS, (size,), generator=g)
        self.codes = torch.multinomial(voice[self.speaker], LENGTH, replacement=True, generator=g)

    def __len__(self):
        return len(self.speaker)

    def __getitem__(self, i):
        return {"input_ids": self.codes[i], "labels": self.speaker[i]}


class Embedder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        config = BertConfig(
            vocab_size=CODES, hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=LENGTH,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.project = nn.Linear(width, 16)

    def forward(self, input_ids, labels=None):
        states = self.encoder(input_ids=input_ids).last_hidden_state
        return self.project(states.mean(1))


class MarginSoftmax(nn.Module):
    def __init__(self, width=16, classes=SPEAKERS, scale=12.0, margin=0.2):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, width))
        self.scale, self.margin = scale, margin

    def forward(self, x, labels):
        cosine = F.normalize(x, dim=1) @ F.normalize(self.centers, dim=1).T
        cosine = cosine - self.margin * F.one_hot(labels, cosine.shape[1])
        return F.cross_entropy(self.scale * cosine, labels)


class SpeakerTrainer(Trainer):
    def __init__(self, *args, criterion, **kwargs):
        super().__init__(*args, **kwargs)
        self.criterion = criterion

    def create_optimizer(self, model=None):
        super().create_optimizer(model)
        self.optimizer.add_param_group({"params": list(self.criterion.parameters()), "weight_decay": 0.0})
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.criterion.zero_grad()
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        vectors = model(input_ids=inputs["input_ids"])
        loss = self.criterion(vectors, inputs["labels"])
        return (loss, {"vectors": vectors}) if return_outputs else loss


def main():
    set_seed(4)
    args = TrainingArguments(
        output_dir="voices",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SpeakerTrainer(
        model=Embedder(), args=args, train_dataset=Utterances(512, seed=0), criterion=MarginSoftmax()
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), "voices.pt")
        print(f"train loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
