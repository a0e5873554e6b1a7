"""Text tasks on ranks, and the same trainings by hand in plain torch: importable functions that return plain values."""

import torch
from torch.nn import functional

from lockstep import Task
from lockstep.core.data.order import permute
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_recipes.tasks.text.options import TextOptions
from lockstep_recipes.tasks.text.task import Text
from tests import runs

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
EPS = 1e-6  # the bias of attention's keys has no gradient but rounding, which AdamW's own 1e-8 would let it follow
SMALL = {
    "train": "docstrings",
    "max_length": 48,
    "scratch": {"architecture": "bert", "sizes": SIZES, "vocab_size": 500},
}

BAG = {"train": "docstrings", "max_length": 48, "scratch": {"vocab_size": 500}}


def text_task(train, eval=None, **options):
    return Text(TextOptions.model_validate(options), train, eval)


def train(options, settings, run_dir=None):
    """A text task in float64."""
    return runs.fit(ComparableTask(text_task(**options), TaskChanges(float64=True)), settings, run_dir)


def difference(one, other):
    """Largest difference of any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def by_hand(options, steps, global_batch, weights=None, make=None):
    """Train with Hugging Face's tokenizer and model in float64: the global batch at once, by torch's weighted mean.

    Args:
        make: a function that makes the model. None: it is new.

    Returns:
        weights by name, and the loss of each step.
    """
    from transformers import AutoModelForSequenceClassification

    task = text_task(**options)
    data = task.train_data()
    tokenizer, names = task.tokenizer, task.labels
    samples = [(data[index].text, data[index].label) for index in range(len(data))]
    torch.manual_seed(0)
    model = (make or (lambda: AutoModelForSequenceClassification.from_config(task.config)))().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=EPS)
    per_epoch = -(-len(samples) // global_batch)
    losses = []
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        places = range(within * global_batch, min((within + 1) * global_batch, len(samples)))
        mine = [samples[index] for index in permute(list(places), len(samples), 0, epoch)]
        batch = tokenizer(
            [text for text, _ in mine],
            truncation=True,
            max_length=options["max_length"],
            padding=True,
            return_tensors="pt",
        )
        weight = (
            None if weights is None else torch.tensor([weights.get(name, 1.0) for name in names], dtype=torch.float64)
        )
        loss = functional.cross_entropy(
            model(**batch).logits, torch.tensor([label for _, label in mine]), weight=weight
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, losses


class Causal(Task):
    """A tiny GPT-2 on sequences of 3 to 20 tokens: the unit of the loss is the predicted token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 21, (90,), generator=generator).tolist()
        self.sequences = [torch.randint(0, 40, (length,), generator=generator) for length in lengths]

    def model(self):
        from transformers import AutoModelForCausalLM, GPT2Config

        sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = GPT2Config(
            vocab_size=40,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            **sizes,
        )
        self.built = AutoModelForCausalLM.from_config(config).double()
        return self.built

    def train_data(self):
        return Sequences(self.sequences)

    def collate(self, samples):
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence(
            [sample[1:] for sample in samples], batch_first=True, padding_value=-100
        )
        return {
            "input_ids": ids,
            "attention_mask": torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(sample) for sample in samples], batch_first=True
            ),
        }, targets

    def weight(self, batch):
        return (batch[1] != -100).sum()

    def loss(self, model, batch):
        logits = model(**batch[0]).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")


class Sequences(torch.utils.data.Dataset):
    def __init__(self, sequences):
        self.sequences, self.lengths = sequences, [len(sequence) for sequence in sequences]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index]


def train_causal(settings):
    return runs.fit(Causal(), settings)


def causal_by_hand(steps, global_batch):
    """One big batch, and the mean over all its tokens. (Hugging Face's own loss rounds to float32.)"""
    task = Causal()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    length = len(task.sequences)
    per_epoch = -(-length // global_batch)
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        places = range(within * global_batch, min((within + 1) * global_batch, length))
        inputs, _ = task.collate([task.sequences[index] for index in permute(list(places), length, 0, epoch)])
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        functional.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
