"""LoRA fine-tuning of a small RoBERTa on product reviews (peft + datasets)."""
import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments

GOOD = "great lovely sturdy quick bright cheap perfect quiet".split()
BAD = "broken noisy slow flimsy dim pricey awful late".split()
FILL = "the a it was box lamp chair phone arrived after two weeks and my order looks".split()
VOCAB = {w: i + 4 for i, w in enumerate(GOOD + BAD + FILL)}
MAX_LEN = 14


def make_reviews(n=600):
    rng = np.random.RandomState(2024)
    texts, labels = [], []
    for _ in range(n):
        y = int(rng.rand() < 0.5)
        words = list(rng.choice(FILL, size=rng.randint(6, 10)))
        for w in rng.choice(GOOD if y else BAD, size=2):
            words.insert(rng.randint(len(words)), w)
        if rng.rand() < 0.1:
            y = 1 - y
        texts.append(" ".join(words))
        labels.append(y)
    return Dataset.from_dict({"text": texts, "label": labels})


def tokenize(row):
    ids = [0] + [VOCAB[w] for w in row["text"].split()][: MAX_LEN - 2] + [2]
    mask = [1] * len(ids) + [0] * (MAX_LEN - len(ids))
    return {"input_ids": ids + [1] * (MAX_LEN - len(ids)), "attention_mask": mask, "labels": row["label"]}


def accuracy(pred):
    return {"accuracy": float((np.argmax(pred.predictions, -1) == pred.label_ids).mean())}


def main():
    reviews = make_reviews().map(tokenize, remove_columns=["text", "label"])
    splits = reviews.train_test_split(test_size=0.2)
    print(f"{len(splits['train'])} reviews for training, {len(splits['test'])} held out")

    torch.manual_seed(0)
    base = RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=len(VOCAB) + 4,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=MAX_LEN + 4,
            num_labels=2,
        )
    )
    model = get_peft_model(
        base,
        LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["query", "value"]),
    )
    args = TrainingArguments(
        output_dir="lora",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=10,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model("lora/best")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
