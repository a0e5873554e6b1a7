"""Attention within documents: flex and flash attention give what SDPA with a mask gives."""

import contextlib
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention import flex_attention, varlen

from lockstep.core.blocks import COMPILED_WITH
from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.lm import attention, models
from tests import lm_cases
from tests.lm_cases import small_task

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, -1, -1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 0, 1, 0, 0]])


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    return small_task(lm_cases.corpus(tmp_path)).model()


def logits_and_gradients(model, mask):
    ids = torch.arange(20).view(2, 10) * 7 % 300
    logits = models.called(model, ids, POSITIONS, mask).logits
    model.zero_grad()
    logits[DOCUMENTS >= 0].float().square().sum().backward()
    return logits[DOCUMENTS >= 0], {name: parameter.grad for name, parameter in model.named_parameters()}


def apart(one, other):
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max())


def test_flex_attention_is_that_of_the_mask(model, monkeypatch):
    logits, gradients = logits_and_gradients(model, attention.document_mask(DOCUMENTS))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses backward passes on CPUs
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        found, of_flex = logits_and_gradients(model, attention.block_mask(DOCUMENTS))
    assert apart(found, logits) < 1e-5
    assert max(apart(of_flex[name], gradients[name]) for name in gradients) < 1e-4


def test_attention_in_groups_of_documents_is_that_of_the_mask(model):
    groups = attention.groups_of(POSITIONS)
    assert groups.shapes == [(2, 5), (1, 3), (2, 2), (3, 1)]  # paddings are documents of a token
    assert torch.equal(groups.taken[groups.back], torch.arange(20))
    logits, gradients = logits_and_gradients(model.double(), attention.document_mask(DOCUMENTS))
    found, of_groups = logits_and_gradients(model, groups)
    assert apart(found, logits) < 1e-12
    assert max(apart(of_groups[name], gradients[name]) for name in gradients) < 1e-12


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_groups_hold_each_place_once_in_its_document(lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    groups = attention.groups_of(positions)
    assert sum(count for count, _ in groups.shapes) == len(lengths)
    assert torch.equal(groups.taken[groups.back], torch.arange(len(positions[0])))
    at, found = 0, []
    for count, longest in groups.shapes:
        for row in groups.taken[at : at + count * longest].view(count, longest):
            assert torch.equal(row, row[0] + torch.arange(longest).clamp(max=int(row[-1] - row[0])))
            found.append(int(row[-1] - row[0]) + 1)
        at += count * longest
    assert sorted(found) == sorted(lengths)


def varlen_by_hand(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False, num_splits=None
):
    """What the documentation of `varlen_attn` says, sequence by sequence. It stands in for a function of GPUs."""
    assert num_splits == 1
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q[-1] == len(query)
    assert int(cu_seq_q.diff().max()) <= min(max_q, max_k)
    sizes = cu_seq_q.diff().tolist()
    parts = zip(*(torch.split(tensor.transpose(0, 1), sizes, dim=1) for tensor in (query, key, value)), strict=True)
    causal = window_size == (-1, 0)
    found = [functional.scaled_dot_product_attention(*each, is_causal=causal, enable_gqa=enable_gqa) for each in parts]
    return torch.cat(found, dim=1).transpose(0, 1)


def test_flash_attention_gets_the_documents_one_behind_the_other(model, monkeypatch):
    pieces = attention.PackedSequences(attention.begins_of(POSITIONS), 10)
    assert pieces.begins.tolist() == [0, 3, 5, 10, 11, 16, 18, 19, 20]  # each padding stands alone
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_hand)
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients = logits_and_gradients(model, attention.document_mask(DOCUMENTS))
        found, of_flash = logits_and_gradients(model, pieces)
    assert apart(found, logits) < 0.02
    assert max(apart(of_flash[name], gradients[name]) for name in gradients) < 0.05
    with pytest.raises(UsageError, match=r"task.attention=flash: .* in 16 bits, not in float32"):
        logits_and_gradients(model, pieces)


def leaky(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """Wrong: documents see each other."""
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return varlen_by_hand(query, key, value, whole, whole, len(query), len(query), **options)


def absent(*_, **options):
    raise NotImplementedError("no kernel\nfor this device")


@pytest.mark.parametrize(
    ("attend", "precision", "fault"),
    [
        (varlen_by_hand, torch.bfloat16, None),
        (varlen_by_hand, torch.float32, None),
        (leaky, torch.bfloat16, r"it differs from attention with a mask by \d"),
        (absent, torch.bfloat16, "NotImplementedError: no kernel"),
    ],
)
def test_auto_is_flash_attention_where_a_trial_gives_what_a_mask_gives(
    model, tmp_path, monkeypatch, attend, precision, fault
):
    task = small_task(lm_cases.corpus(tmp_path))
    monkeypatch.setattr(task, "_gives_begins", True)
    data = task.train_data()
    batch = task.collate([data[index] for index in range(len(data) - 4, len(data))])
    assert isinstance(attention.mask_for("auto", model, batch), attention.Groups)  # without CUDA
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    monkeypatch.setattr(attention, "_has_splits", lambda: True)
    attention._fault_of_flash.cache_clear()
    random = torch.get_rng_state()
    expected = attention.PackedSequences if fault is None and precision == torch.bfloat16 else attention.Groups
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        with pytest.warns(UserWarning, match=fault) if fault else contextlib.nullcontext():
            found = attention.mask_for("auto", model, batch)
        assert type(found) is type(attention.mask_for("auto", model, batch)) is expected
        monkeypatch.setattr(model, COMPILED_WITH, {}, raising=False)
        assert isinstance(attention.mask_for("auto", model, batch), attention.Groups)
    assert torch.equal(torch.get_rng_state(), random)
    attention._fault_of_flash.cache_clear()


@pytest.mark.parametrize("kind", ["auto", "sdpa", "flex", "flash"])
def test_a_batch_has_what_its_attention_needs(tmp_path, monkeypatch, kind):
    task = small_task(lm_cases.corpus(tmp_path), attention=kind)
    data, model = task.train_data(), task.model()
    batch = task.collate([data[index] for index in range(len(data) - 4, len(data))])
    masks = {"auto": attention.Groups, "sdpa": attention.Groups}
    masks |= {"flex": flex_attention.BlockMask, "flash": attention.PackedSequences}
    assert isinstance(attention.mask_for(kind, model.eval(), batch), attention.Groups)  # without CUDA
    of_transformers = small_task(lm_cases.corpus(tmp_path), config=lm_cases.LLAMA).model()
    assert isinstance(attention.mask_for("sdpa", of_transformers, batch), torch.Tensor)
    assert task.predict(model.eval(), batch)["nats"].sum() > 0
    if kind in ("flex", "flash"):
        with pytest.raises(UsageError, match=f"task.attention={kind}: {kind} attention has no backward pass on cpu"):
            task.loss(model.train(), batch)
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)
    assert type(attention.mask_for(kind, model.eval(), batch)) is masks[kind]


def test_models_of_transformers_find_documents_by_positions_with_flex_and_flash(tmp_path, monkeypatch):
    corpus = lm_cases.corpus(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = small_task(corpus, config=lm_cases.LLAMA, attention="flex").model()
    assert model.config._attn_implementation == "flex_attention"
    assert attention.finds_documents(model)
    assert not attention.finds_documents(small_task(corpus, config=lm_cases.LLAMA).model())
    assert not attention.finds_documents(small_task(corpus, attention="flex").model())
    with pytest.raises(UsageError, match=r"task.attention=flash: LlamaForCausalLM cannot use it"):
        small_task(corpus, config=lm_cases.LLAMA, attention="flash").model()


def test_shared_heads_are_copied_only_where_no_fast_kernel_shares_them(monkeypatch):
    torch.manual_seed(0)
    shapes = ((2, 4, 10, 8), (2, 2, 10, 8), (2, 2, 10, 8))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seen = []
    attend = functional.scaled_dot_product_attention

    def spied(query, key, value, **options):
        seen.append((key.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spied)
    for mask in (None, attention.document_mask(DOCUMENTS.clamp(min=0))):
        found = []
        for shares in (True, False):
            monkeypatch.setattr(attention, "_shares_heads", lambda *_, answer=shares: answer)
            mixed = attention.attend(*inputs, mask, mask is None)
            found.append((mixed, *torch.autograd.grad(mixed.square().sum(), inputs)))
        assert max(apart(one, other) for one, other in zip(*found, strict=True)) < 1e-14
    assert seen == [(2, True), (4, False)] * 2


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_shared_heads_are_traced_for_the_graph_of_tensorboard():
    inputs = [torch.randn(2, heads, 10, 8) for heads in (4, 2, 2)]
    traced = torch.jit.trace(lambda *heads: attention.attend(*heads, None, True), inputs, check_trace=False)
    torch.testing.assert_close(traced(*inputs), attention.attend(*inputs, None, True))


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "width", "shares"),
    [
        ("cpu", torch.float32, True, 8, True),
        ("cuda", torch.bfloat16, False, 256, True),
        ("cuda", torch.bfloat16, False, 512, False),
        ("cuda", torch.bfloat16, True, 64, False),  # flash attention takes no mask
        ("cuda", torch.float32, False, 64, False),  # and 16 bits only
        ("mps", torch.float32, False, 64, False),
    ],
)
def test_kernels_that_share_heads(device, dtype, masked, width, shares):
    value = types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(2, 2, 10, width))
    assert attention._shares_heads(value, torch.ones(1) if masked else None) is shares
