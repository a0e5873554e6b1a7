"""Dense retriever: one shared BERT encoder for questions and passages, in-batch negatives (InfoNCE)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

VOCAB, TOPICS = 400, 256


class QAPairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        topic = torch.arange(n) % TOPICS
        table = torch.randint(10, VOCAB, (TOPICS, 5), generator=torch.Generator().manual_seed(99))
        self.q = torch.cat([table[topic][:, :3], torch.randint(10, VOCAB, (n, 3), generator=g)], 1)
        self.p = torch.cat([table[topic][:, 2:], torch.randint(10, VOCAB, (n, 9), generator=g)], 1)

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return {"question": self.q[i], "passage": self.p[i]}


class Retriever(nn.Module):
    def __init__(self, config, dim=32):
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.proj = nn.Linear(config.hidden_size, dim)

    def encode(self, ids):
        hidden = self.encoder(input_ids=ids).last_hidden_state
        return F.normalize(self.proj(hidden.mean(1)), dim=-1)

    def forward(self, question, passage):
        return self.encode(question), self.encode(passage)


class RetrieverTrainer(Trainer):
    temperature = 0.05

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        q, p = model(inputs["question"], inputs["passage"])
        passages = self.accelerator.gather(p)
        offset = self.accelerator.process_index * q.size(0)
        target = torch.arange(q.size(0), device=q.device) + offset
        scores = q @ passages.T / self.temperature
        loss = F.cross_entropy(scores, target)
        return (loss, {"scores": scores}) if return_outputs else loss


@torch.no_grad()
def recall_at_5(model, data):
    model.eval()
    q, p = model.encode(data.q), model.encode(data.p)
    top = (q @ p.T).topk(5, dim=1).indices
    return (top == torch.arange(len(q))[:, None]).any(1).float().mean().item()


def main():
    set_seed(21)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        output_dir="retriever",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        seed=21,
    )
    model = Retriever(config)
    trainer = RetrieverTrainer(model=model, args=args, train_dataset=QAPairs(512, 0))
    trainer.train()
    if trainer.is_world_process_zero():
        print("recall@5", recall_at_5(model, QAPairs(TOPICS, 5)))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
