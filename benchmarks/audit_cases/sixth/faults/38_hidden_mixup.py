"""Intent classification with manifold mixup: sentence vectors are mixed before the classifier."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

INTENTS, VOCAB = 6, 180


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(INTENTS, (n,), generator=g)
        self.x = torch.randint(60, VOCAB, (n, 12), generator=g)
        self.x[:, 0] = 1
        for k in (3, 6, 10):
            self.x[:, k] = 4 + self.y * 8 + torch.randint(8, (n,), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


class MixupTrainer(Trainer):
    def __init__(self, *args, alpha=0.4, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta = torch.distributions.Beta(alpha, alpha)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

        labels = inputs["labels"]
        net = self.accelerator.unwrap_model(model)
        hidden = net.distilbert(input_ids=inputs["input_ids"]).last_hidden_state[:, 0]
        lam = self.beta.sample().to(hidden.device)
        order = torch.randperm(hidden.size(0), device=hidden.device)
        mixed = lam * hidden + (1 - lam) * hidden[order]
        logits = net.classifier(net.dropout(F.relu(net.pre_classifier(mixed))))
        loss = lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, labels[order])
        return (loss, {"logits": logits}) if return_outputs else loss


def compute_metrics(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(17)
    config = DistilBertConfig(
        vocab_size=VOCAB,
        dim=48,
        hidden_dim=96,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=16,
        num_labels=INTENTS,
    )
    args = TrainingArguments(
        output_dir="intents",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        warmup_steps=4,
        logging_steps=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        seed=17,
    )
    trainer = MixupTrainer(
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=Utterances(480, 0),
        eval_dataset=Utterances(120, 1),
        compute_metrics=compute_metrics,
        alpha=0.4,
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
