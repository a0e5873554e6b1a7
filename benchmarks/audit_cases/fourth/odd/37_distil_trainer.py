"""Distillation: a fixed teacher (kept out of DDP) guides a smaller student."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (n,), generator=g)
        self.x = torch.randint(10, 60, (n, 9), generator=g)
        self.x[:, 3] = self.x[:, 5] = self.x[:, 7] = 60 + self.y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


def bert(width, layers):
    return BertForSequenceClassification(BertConfig(
        vocab_size=70, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * width,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class DistilTrainer(Trainer):
    def __init__(self, *args, teacher=None, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.temperature, self.alpha = temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            guide = self.teacher(input_ids=inputs["input_ids"]).logits
        t = self.temperature
        soft = F.kl_div(F.log_softmax(outputs.logits / t, -1), F.softmax(guide / t, -1), reduction="batchmean") * t * t
        loss = self.alpha * soft + (1 - self.alpha) * outputs.loss
        return (loss, outputs) if return_outputs else loss


def fit_teacher(data):
    # every process fits the same small teacher from the same seed on the whole set
    torch.manual_seed(77)
    teacher = bert(48, 1)
    opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for i in list(range(0, len(data), 16)) * 8:
        teacher(input_ids=data.x[i:i + 16], labels=data.y[i:i + 16]).loss.backward()
        opt.step()
        opt.zero_grad()
    return teacher


def main():
    train, dev = Utterances(192, 0), Utterances(48, 1)
    teacher = fit_teacher(train)
    set_seed(27)
    args = TrainingArguments("distil", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=8,
                             learning_rate=6e-3, eval_strategy="epoch", save_strategy="no", logging_strategy="no",
                             report_to="none", disable_tqdm=True)
    trainer = DistilTrainer(bert(24, 1), args, train_dataset=train, eval_dataset=dev, teacher=teacher,
                            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())})
    trainer.train()
    if trainer.is_world_process_zero():
        print([(round(h["eval_loss"], 4), h["eval_accuracy"]) for h in trainer.state.log_history if "eval_loss" in h])


if __name__ == "__main__":
    main()
