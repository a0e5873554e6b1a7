"""LoRA fine-tuning of a small DistilBERT on synthetic product reviews."""
import numpy as np
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH = 80, 12


def load_reviews(size=640):
    """Each review has some words of praise (2..9) or complaint (10..17); a fifth of the labels is wrong."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size)
    ids = rng.integers(18, VOCAB, (size, LENGTH))
    for row, label in enumerate(labels):
        spots = rng.choice(LENGTH, 3, replace=False)
        ids[row, spots] = rng.integers(2, 10, 3) + 8 * label
    flip = rng.random(size) < 0.2
    labels = np.where(flip, 1 - labels, labels)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    reviews = load_reviews().train_test_split(test_size=0.2)
    train, valid = reviews["train"], reviews["test"]

    set_seed(33)
    config = DistilBertConfig(
        vocab_size=VOCAB, dim=48, n_layers=2, n_heads=4, hidden_dim=96,
        max_position_embeddings=LENGTH, num_labels=2,
    )
    model = get_peft_model(
        DistilBertForSequenceClassification(config),
        LoraConfig(
            task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.0,
            target_modules=["q_lin", "v_lin", "lin1", "lin2"],
        ),
    )
    args = TrainingArguments(
        output_dir="reviews",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        label_names=["labels"],
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=train, eval_dataset=valid, compute_metrics=accuracy
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model("reviews/adapter")
    if trainer.is_world_process_zero():
        print(f"{len(train)} train / {len(valid)} valid  accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
