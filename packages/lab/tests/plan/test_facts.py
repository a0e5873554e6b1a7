"""Facts of small tasks from traced passes: bytes by hand, operations by torch's counter, models without a trace."""

import dataclasses
import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from lockstep import Task
from lockstep.core.errors import UsageError
from lockstep_lab.plan import facts
from lockstep_lab.plan.facts import facts_of
from packages.lab.tests.plan.cases import Blocks, Layer, Mlp, Reads, config
from tests.selection import mainly


def test_an_epoch_has_the_samples_that_the_data_set_draws():
    class Weighted(Mlp):
        def train_data(self):
            data = super().train_data()
            data.sample_weights = torch.arange(40)
            return data

    drawn = config(data={"samples_per_epoch": 30})
    assert facts_of(Weighted(), drawn, precisions=("fp32",), recompute=(False,)).samples == 30


def plain(task, **options):
    return facts_of(task, config(), precisions=("fp32",), recompute=(False,), **options)


def test_the_bytes_of_a_network_by_hand():
    facts = plain(Mlp(), device="cpu")
    passes = facts.passes["fp32", False, None]
    assert passes.batch.at(5) == 5 * (8 + 1) * 4
    # Two results of tanh, and the output of the network for the loss; the loss itself is one number.
    assert passes.kept.at(5) == 5 * (16 + 16 + 1) * 4 + 4
    assert facts.elements == 8 * 16 + 16 + 16 * 16 + 16 + 16 + 1
    assert facts.samples == 40
    backward = [segment for segment in passes.segments if segment.phase == "backward"]
    assert max(segment.gradients.at(5) for segment in backward) <= facts.elements * 4


@pytest.mark.cases("512")
@pytest.mark.parametrize("samples", [16, 512])
def test_the_peak_of_a_large_micro_batch_is_that_of_its_own_trace(samples, monkeypatch):
    class Wide(Mlp):  # with few samples, gradients are most of the peak; with many samples, activations
        def model(self):
            return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def peaks():
        segments = plain(Wide(), device="cpu").passes["fp32", False, None].segments
        kinds = [("activations",), ("activations", "gradients"), ("activations", "gradients_of_block")]
        return [max(sum(getattr(s, part).at(samples) for part in kind) for s in segments) for kind in kinds]

    told = peaks()
    monkeypatch.setattr(facts, "_SIZES", (samples, samples + 8))
    assert told == peaks()


def test_no_memory_is_used_for_the_model():
    class Huge(Mlp):
        def model(self):
            return nn.Sequential(nn.Linear(8, 1 << 20), nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 1))

    assert plain(Huge()).elements > 1 << 40  # four terabytes


def test_states_of_optimizers():
    def states(**optim):
        facts = facts_of(Mlp(), config(optim=optim), precisions=("fp32",), recompute=(False,), device="cpu")
        weight = next(p for p in facts.parameters if p.name == "2.weight")
        return weight.state_element_bytes, weight.state_other_bytes

    assert states(name="AdamW") == (8.0, 4)  # two averages, and the number of steps
    assert states(name="SGD") == (0.0, 0)
    assert states(name="SGD", args={"momentum": 0.9}) == (4.0, 0)
    assert states(name="Adafactor") == (0.0, 16 * 4 * 2 + 4)  # sums over rows and over columns


def test_temporary_tensors_of_updates():
    small = [nn.Parameter(torch.zeros(3, 3))]
    assert facts.temporaries_of(torch.optim.SGD(small, lr=1e-3), torch.float32) == (0.0, 0.0)
    assert facts.temporaries_of(torch.optim.AdamW(small, lr=1e-3, fused=True), torch.float32) == (0.0, 0.0)
    of_all, _ = facts.temporaries_of(torch.optim.AdamW(small, lr=1e-3, foreach=True), torch.float32)
    assert of_all >= 4.0  # the roots of all second moments at once
    of_all, of_largest = facts.temporaries_of(torch.optim.AdamW(small, lr=1e-3, foreach=False), torch.float32)
    assert (of_all, of_largest) == (0.0, 8.0)


@pytest.mark.exhaustive
def test_blocks_precision_and_recomputation():
    facts = facts_of(Blocks(), config())
    assert facts.blocks == ("layers.0", "layers.1", "layers.2")
    kept = {key: passes.kept.at(4) for key, passes in facts.passes.items()}
    assert kept["fp32", True, None] < 0.5 * kept["fp32", False, None]
    assert kept["bf16", False, None] < kept["fp32", False, None]
    assert {p.block for p in facts.parameters} == {None, 0, 1, 2}
    of_blocks = 3 * 2 * 2 * 4 * 32 * 32 * Blocks.length  # two products of 32 x 128 for each token
    assert facts.recomputed_flops_per_sample == of_blocks
    casts = max(segment.casts.at(4) for segment in facts.passes["bf16", False, None].segments)
    matrices = [p for p in facts.parameters if p.name != "embed.weight" and "norm" not in p.name]
    assert casts == sum(p.elements * 2 for p in matrices)  # autocast keeps a copy of each weight and bias


def test_blocks_that_return_dataclasses_have_backward_passes_of_their_own():
    @dataclasses.dataclass
    class Result:
        hidden: torch.Tensor

    class Wrapping(Layer):
        def forward(self, x):
            return Result(super().forward(x.hidden))

    class InDataclasses(Blocks):
        def model(self):
            model = super().model()
            model["layers"] = nn.ModuleList([Wrapping(self.width) for _ in range(self.depth)])
            return model

        def loss(self, model, batch):
            x = Result(model["embed"](batch[0]))
            for layer in model["layers"]:
                x = layer(x)
            return cross_entropy(model["head"](x.hidden).flatten(0, 1), batch[0].flatten(), reduction="sum")

    segments = plain(InDataclasses()).passes["fp32", False, None].segments
    assert [s.block for s in segments if s.phase == "backward" and s.block is not None] == [2, 1, 0]


def test_parameters_that_are_gathered_in_16_bits_make_what_follows_narrow():
    class Embeds(Blocks):
        def loss(self, model, batch):
            return model["embed"](batch[0]).tanh().float().sum()

    narrow = {"strategy": "fsdp", "param_dtype": "bf16"}
    task = Embeds()
    facts = facts_of(task, config(parallel=narrow), precisions=("bf16", "fp16"), recompute=(False,), device="cpu")
    results = 4 * Blocks.length * Blocks.width  # of tanh, whose backward pass needs them
    total = 4  # the loss
    assert facts.passes["bf16", False, None].kept.at(4) == results * 4 + total
    assert facts.passes["bf16", False, "bf16"].kept.at(4) == results * 2 + total
    assert {p.element_bytes for p in facts.parameters} == {4}  # as they are stored


def test_a_module_that_cannot_run_with_gathered_parameters_is_named():
    class Wide(nn.Linear):
        def forward(self, values):
            if self.weight.dtype != torch.float32:
                raise TypeError("this kernel needs fp32")
            return super().forward(values)

    class Mixed(Mlp):
        def model(self):
            return nn.Sequential(nn.Linear(8, 16), Wide(16, 1))

    narrow = {"strategy": "fsdp", "param_dtype": "bf16"}
    facts = facts_of(Mixed(), config(parallel=narrow), precisions=("bf16",), recompute=(False,), device="cpu")
    assert facts.passes
    assert set(facts.passes) == {("bf16", False, None)}
    assert "parallel.param_dtype=bf16 in bf16 cannot be traced: module 1: TypeError: this kernel" in facts.notes[-1]


def test_fp16_has_no_fused_update():
    facts = facts_of(Mlp(), config(), precisions=("fp16",), recompute=(False,))
    assert facts.optimizer.temporary_element_bytes == 0.0  # the fused kernel of a GPU
    assert facts.optimizer_of_fp16.temporary_element_bytes >= 4.0
    alike = facts_of(Mlp(), config(precision="fp16"), precisions=("fp32",), recompute=(False,))
    assert (alike.optimizer, alike.optimizer_of_fp16) == (facts.optimizer, facts.optimizer_of_fp16)


def test_dropout_keeps_a_byte_on_a_gpu_and_a_float_on_a_cpu():
    kept = {device: plain(Blocks(), device=device).passes["fp32", False, None].kept.at(4) for device in ("cpu", "cuda")}
    assert kept["cpu"] - kept["cuda"] == 3 * 4 * Blocks.length * Blocks.width * (4 - 1)


def test_the_trace_leaves_the_task_and_torch_as_they_were():
    task, dropout = Mlp(), nn.functional.dropout
    model = task.model
    plain(task)
    assert task.model == model
    assert "model" not in vars(task)
    assert nn.functional.dropout is dropout


def test_frozen_parameters_and_phases_of_unfreezing():
    class Frozen(Mlp):
        def model(self):
            model = super().model()
            model[0].requires_grad_(False)
            return model

    assert [p.trainable for p in plain(Frozen()).parameters] == [False, False, True, True, True, True]
    phases = {"unfreeze": [{"match": ["0.*"], "epoch": 2}], "epochs": 4}
    facts = facts_of(Frozen(), config(train=phases), precisions=("fp32",), recompute=(False,))
    assert all(p.trainable for p in facts.parameters)
    assert any("last phase" in note for note in facts.notes)


def test_a_model_that_reads_values_is_named_and_computed_in_small():
    facts = plain(Reads())
    assert facts.passes
    assert any("module 1" in note for note in facts.notes)
    assert "computed on this machine" in facts.notes[-1]


def test_a_model_that_cannot_run_has_exact_states_and_unknown_activations():
    class Broken(Mlp):
        def loss(self, model, batch):
            raise RuntimeError("the camera is off")

    facts = plain(Broken())
    assert not facts.passes
    assert facts.elements == 433
    assert "Activations are unknown" in facts.notes[-1]


def test_torch_logs_nothing_about_a_model_that_cannot_run(caplog):
    class Misfit(Mlp):
        def model(self):
            return nn.Sequential(nn.Linear(8, 16), nn.Linear(3, 1))

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's own loggers do not pass records on
    try:
        facts = plain(Misfit())
    finally:
        logger.removeHandler(caplog.handler)
    assert any("module 1" in note for note in facts.notes)
    assert not caplog.records
    assert not logger.disabled


def test_what_can_be_computed_in_one_precision_is_known_there():
    class ByNumpy(nn.Module):
        def forward(self, x):
            return x * float(x.detach().numpy().max())  # NumPy has no bf16

    class Mixed(Mlp):
        def model(self):
            return nn.Sequential(nn.Linear(8, 16), ByNumpy(), nn.Linear(16, 1))

    facts = facts_of(Mixed(), config(), recompute=(False,))
    assert set(facts.passes) == {("fp32", False, None)}
    assert facts.flops_per_sample
    assert "computed on this machine" in facts.notes[-2]
    assert "cannot be computed here in bf16" in facts.notes[-1]


def test_a_model_that_cannot_be_made_without_values_is_made_in_full():
    class Computed(Mlp):
        def model(self):
            model = super().model()
            scale = torch.linspace(1.0, 2.0, 3)[1].item()
            return nn.Sequential(model, nn.Linear(1, int(scale)))

    assert plain(Computed()).elements == 433 + 2


def test_tied_parameters_count_once():
    class Tied(Blocks):
        def model(self):
            model = super().model()
            model["head"].weight = model["embed"].weight
            return model

    assert plain(Tied()).elements == plain(Blocks()).elements - 50 * 32


def test_small_data_sets_are_repeated():
    class Few(Mlp):
        def train_data(self):
            return TensorDataset(torch.randn(3, 8), torch.randn(3, 1))

    assert plain(Few()).passes["fp32", False, None].batch.at(1) == 36


def test_the_longest_samples_are_traced():
    class Lengths(TensorDataset):
        lengths = torch.arange(40).numpy()

        def __getitem__(self, index):
            return (torch.ones(index + 1),)

    class Padded(Task):
        def model(self):
            return nn.Linear(1, 1)

        def train_data(self):
            return Lengths(torch.zeros(40, 1))

        def collate(self, samples):
            return nn.utils.rnn.pad_sequence([sample[0] for sample in samples], batch_first=True)

        def loss(self, model, batch):
            return model(batch[..., None]).square().sum()

    facts = plain(Padded())
    assert facts.passes["fp32", False, None].batch.at(1) == 40 * 4
    assert facts.data == "samples of the training data, the longest"


# ---- operations


class Transformers(Task):
    """Small models of the five kinds that the benchmark has."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        import transformers as hf

        eager = {"attn_implementation": "eager"}  # torch's counter has no formula for the CPU's attention
        common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, **eager}
        if self.kind == "bert":
            return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=100, num_labels=3, **common))
        if self.kind == "vit":
            return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **common))
        if self.kind == "resnet":
            sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1]}
            return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=3, **sizes))
        if self.kind == "segformer":
            sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}
            return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=3, **sizes, **eager))
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, use_cache=False, **eager)
        )

    def train_data(self):
        if self.kind in ("bert", "gpt2"):
            return TensorDataset(torch.randint(0, 100, (8, 16)))
        return TensorDataset(torch.randn(8, 3, 32, 32))

    def loss(self, model, batch):
        logits = model(batch[0]).logits
        if self.kind == "gpt2":
            return cross_entropy(logits.flatten(0, 1), batch[0].flatten(), reduction="sum")
        return cross_entropy(logits, torch.zeros_like(logits[:, 0]).long(), reduction="sum")


@pytest.mark.parametrize("kind", mainly(["bert"], ["bert", "resnet", "vit", "segformer", "gpt2"]))
def test_operations_are_those_of_torchs_counter(kind):
    task = Transformers(kind)
    facts = plain(task)
    model = task.model()
    with FlopCounterMode(display=False) as counter:
        task.loss(model, task.train_data().tensors).backward()
    assert facts.flops_per_sample * 8 == counter.get_total_flops()
    assert not [note for note in facts.notes if "cannot" in note and "made in full" not in note]


def test_a_lazy_model_is_an_error_that_names_the_layer():
    class Lazy(Reads):
        def model(self):
            return nn.Sequential(nn.LazyLinear(4))

    with pytest.raises(UsageError, match=r"made lazily: 0\.weight"):
        plain(Lazy())


def test_values_read_in_the_models_own_forward_are_not_blamed_on_the_loss():
    class Outer(nn.Linear):
        def forward(self, values):
            return super().forward(values) * values.sum().item()

    class Own(Reads):
        def model(self):
            return Outer(16, 4)

    assert any("the model's own forward" in note for note in plain(Own()).notes)


def test_torchs_own_transformer_layer_is_traced_as_on_a_gpu():
    class Attention(Reads):
        def model(self):
            return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def loss(self, model, batch):
            return model(batch[0].unsqueeze(1)).square().sum()

    facts = facts_of(Attention(), config(), precisions=("fp32",), recompute=(False,))
    assert facts.passes
    assert not facts.notes
