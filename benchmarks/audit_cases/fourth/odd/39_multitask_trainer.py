import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, PreTrainedModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)


class TwoHeads(PreTrainedModel):
    """One encoder; a batch belongs to a single task and only that task's head is used."""
    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.heads = nn.ModuleList([nn.Linear(config.hidden_size, 3), nn.Linear(config.hidden_size, 1)])
        self.post_init()

    def forward(self, input_ids=None, target=None, task=None):
        h = self.bert(input_ids).last_hidden_state.mean(1)
        if int(task[0]) == 0:
            return {"loss": nn.functional.cross_entropy(self.heads[0](h), target.long())}
        return {"loss": nn.functional.mse_loss(self.heads[1](h).squeeze(-1), target)}


class Mixed(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 40, (n, 7), generator=g)
        self.task = torch.arange(n) % 2
        self.ids[:, 0] = torch.randint(1, 4, (n,), generator=g)
        self.target = torch.where(self.task == 0, self.ids[:, 0] - 1.0, self.ids[:, 0] / 3.0)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "target": self.target[i], "task": self.task[i]}


class AlternatingBatches:
    """Blocks of `world` batches of one task in turn, so that all processes work at the same head."""

    def __init__(self, task, batch_size, world, seed=0):
        self.groups = [torch.nonzero(task == t).flatten() for t in (0, 1)]
        self.batch_size, self.world, self.seed, self.round = batch_size, world, seed, 0
        self.drop_last = True
        self.blocks = min(len(g) for g in self.groups) // (batch_size * world)

    def __len__(self):
        return 2 * self.blocks * self.world

    def __iter__(self):
        rng = torch.Generator().manual_seed(self.seed + self.round)
        self.round += 1
        mixed = [g[torch.randperm(len(g), generator=rng)].split(self.batch_size) for g in self.groups]
        for b in range(self.blocks):
            for batches in mixed:
                for k in range(self.world):
                    yield batches[b * self.world + k].tolist()


class MultiTaskTrainer(Trainer):
    def get_train_dataloader(self):
        sampler = AlternatingBatches(self.train_dataset.task, self.args.per_device_train_batch_size, self.args.world_size)
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator))


if __name__ == "__main__":
    set_seed(35)
    config = BertConfig(vocab_size=48, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    args = TrainingArguments("heads", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=8, learning_rate=5e-3,
                             ddp_find_unused_parameters=True, logging_steps=4, save_strategy="epoch", save_total_limit=1,
                             remove_unused_columns=False, report_to="none", disable_tqdm=True)
    trainer = MultiTaskTrainer(TwoHeads(config), args, train_dataset=Mixed(256, 0))
    trainer.train()
    norm = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).norm().item()
    print(f"rank {args.process_index} steps {trainer.state.global_step} |w| {norm:.6f}", flush=True)
