import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, PreTrainedModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)


class PairConfig(BertConfig):
    model_type = "pair-ranker"


class Ranker(PreTrainedModel):
    config_class = PairConfig

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.score = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, good_ids=None, bad_ids=None):
        good = self.score(self.bert(good_ids).last_hidden_state[:, 0])
        bad = self.score(self.bert(bad_ids).last_hidden_state[:, 0])
        return {"loss": nn.functional.softplus(bad - good).mean(), "margin": (good - bad).squeeze(-1)}


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.good, self.bad = torch.randint(5, 40, (n, 8), generator=g), torch.randint(5, 40, (n, 8), generator=g)
        self.good[:, 1:3] = torch.randint(30, 44, (n, 2), generator=g)
        self.bad[:, 1:3] = torch.randint(22, 36, (n, 2), generator=g)

    def __len__(self):
        return len(self.good)

    def __getitem__(self, i):
        return {"good_ids": self.good[i], "bad_ids": self.bad[i]}


class RankTrainer(Trainer):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        self.model.eval()
        margins = []
        for batch in self.get_eval_dataloader(eval_dataset):
            with torch.no_grad():
                out = self.model(**self._prepare_inputs(batch))
            margins.append(out["margin"])
        margins = torch.cat(margins)
        metrics = {f"{metric_key_prefix}_pair_accuracy": (margins > 0).float().mean().item()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


if __name__ == "__main__":
    set_seed(23)
    cfg = PairConfig(vocab_size=48, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                     max_position_embeddings=16)
    args = TrainingArguments(
        output_dir="ranker", use_cpu=True, num_train_epochs=5, per_device_train_batch_size=8,
        per_device_eval_batch_size=8, learning_rate=8e-3, lr_scheduler_type="constant", eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="pair_accuracy",
        greater_is_better=True, logging_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = RankTrainer(Ranker(cfg), args, train_dataset=Pairs(128, 0), eval_dataset=Pairs(48, 1))
    trainer.train()
    history = [round(h["eval_pair_accuracy"], 4) for h in trainer.state.log_history if "eval_pair_accuracy" in h]
    norm = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).norm().item()
    print(f"rank {args.process_index} {history} best {trainer.state.best_model_checkpoint} |w| {norm:.6f}", flush=True)
