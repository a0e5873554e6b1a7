"""FAQ retrieval: one small BERT encodes questions and answers, InfoNCE over the whole global batch."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

VOCAB, LEN = 300, 12


class FaqPairs(Dataset):
    """A question shares a few rare words with its answer."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.pairs = []
        for _ in range(n):
            key = [rng.randrange(100, VOCAB) for _ in range(4)]
            question = [1] + key + [rng.randrange(2, 50) for _ in range(LEN - 5)]
            answer = [1] + [rng.randrange(50, 100) for _ in range(LEN - 5)] + key
            self.pairs.append((question, answer))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        question, answer = self.pairs[i]
        return {"question": torch.tensor(question), "answer": torch.tensor(answer)}


class Retriever(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)

    def encode(self, ids):
        return F.normalize(self.bert(ids).last_hidden_state.mean(1), dim=-1)

    def forward(self, question, answer):
        both = self.encode(torch.cat([question, answer]))
        return both.chunk(2)


def gather_rows(x):
    """The rows of all processes, in the order of the ranks; gradients flow back to their owners."""
    if not dist.is_initialized():
        return x
    return torch.cat(all_gather(x.contiguous()))


class InfoNCETrainer(Trainer):
    temperature = 0.07

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        q, a = model(inputs["question"], inputs["answer"])
        if model.training:
            all_q, all_a = gather_rows(q), gather_rows(a)
        else:
            all_q, all_a = q, a
        target = torch.arange(q.size(0), device=q.device)
        loss_q = F.cross_entropy(q @ all_a.t() / self.temperature, target)
        loss_a = F.cross_entropy(a @ all_q.t() / self.temperature, target)
        loss = (loss_q + loss_a) / 2
        return (loss, {"loss": loss, "q": q, "a": a}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, out = self.compute_loss(model, inputs, return_outputs=True)
        return loss, (out["q"], out["a"]), torch.zeros(len(out["q"]), device=loss.device)


def hits_at_1(pred):
    q, a = (torch.tensor(x) for x in pred.predictions)
    return {"hits_at_1": ((q @ a.t()).argmax(1) == torch.arange(len(q))).float().mean().item()}


if __name__ == "__main__":
    set_seed(17)
    config = BertConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=4,
                        intermediate_size=96, max_position_embeddings=LEN, hidden_dropout_prob=0.0)
    args = TrainingArguments(
        output_dir="faq-retriever", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", logging_steps=10,
        dataloader_drop_last=True, save_strategy="no", report_to=[], disable_tqdm=True, seed=17,
        remove_unused_columns=False,
    )
    trainer = InfoNCETrainer(model=Retriever(config), args=args, train_dataset=FaqPairs(960, seed=1),
                             eval_dataset=FaqPairs(128, seed=2), compute_metrics=hits_at_1)
    trainer.train()
    trainer.save_model("faq-retriever/final")
