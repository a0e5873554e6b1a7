"""The digest of a tensor: every bit and every place counts, the memory layout does not."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.data.order import derive_seed
from lockstep.parts import digest as module
from lockstep.parts.digest import digest, digest_of_batch, fold, quick_sums

MASK = (1 << 64) - 1
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [torch.bool, *INTEGERS, *REALS, torch.complex64, torch.complex128]
OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def some(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bool], ids=str)
def test_any_single_bit_changes_the_digest(dtype):
    tensor = some(dtype, 3, 2)
    known = {digest(tensor)}
    raw = tensor.view(-1).view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            known.add(digest(tensor))
            raw[byte] ^= 1 << bit
    assert len(known) == 1 + 8 * len(raw)


def test_any_single_truth_value_changes_the_digest():
    known = set()
    for place in range(10):
        tensor = torch.zeros(10, dtype=torch.bool)
        tensor[place] = True
        known.add(digest(tensor))
    known.add(digest(torch.zeros(10, dtype=torch.bool)))
    assert len(known) == 11


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_number_and_its_negative_in_swapped_places_differ(dtype):
    tensor = torch.tensor([1.5, -1.5], dtype=dtype)
    assert digest(tensor) != digest(tensor.flip(0))


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_two_flipped_signs_differ(dtype):
    tensor = some(dtype, 40)
    other = tensor.clone()
    other[[3, 20]] = -other[[3, 20]]
    assert digest(tensor) != digest(other)
    assert digest(tensor) != digest(-tensor)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_round_numbers_that_swap_places_far_from_each_other_differ(dtype):
    one, other = torch.ones(1 << 14, dtype=dtype), torch.ones(1 << 14, dtype=dtype)
    one[0] = 2.0
    found = {digest(one)}
    for shift in range(14):
        other = torch.ones(1 << 14, dtype=dtype)
        other[1 << shift] = 2.0
        found.add(digest(other))
    assert len(found) == 15


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20, unique=True), st.data())
@settings(max_examples=60, deadline=None)
def test_permutations_of_distinct_values_differ(values, data):
    shuffled = data.draw(st.permutations(values))
    assert (digest(torch.tensor(values)) == digest(torch.tensor(shuffled))) == (values == list(shuffled))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.data())
@settings(max_examples=60, deadline=None)
def test_one_other_float_differs_and_the_same_floats_do_not(values, data):
    tensor, other = torch.tensor(values, dtype=torch.float32), torch.tensor(values, dtype=torch.float32)
    assert digest(tensor) == digest(other)
    place = data.draw(st.integers(0, len(values) - 1))
    bits = other.view(torch.int32)
    bits[place] = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda bit: bit != int(bits[place])))
    assert digest(tensor) != digest(other)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_minus_zero_is_not_zero(dtype):
    assert digest(torch.tensor([0.0], dtype=dtype)) != digest(torch.tensor([-0.0], dtype=dtype))


def test_payloads_of_nan_differ_and_the_same_nan_is_the_same():
    quiet, other = (
        torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
        torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    )
    assert bool(quiet.isnan())
    assert bool(other.isnan())
    assert digest(quiet) == digest(quiet.clone())
    assert digest(quiet) != digest(other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_has_the_digest_of_its_contiguous_copy(dtype):
    tensor = some(dtype, 6, 4)
    for view in (
        tensor.t(),
        tensor[::2],
        tensor[:, 1:3],
        tensor[1],
        tensor[:, 2],
        tensor.expand(2, 6, 4),
        tensor.reshape(2, 3, 4).permute(2, 0, 1),
    ):
        assert digest(view) == digest(view.contiguous().clone())
    assert digest(tensor.t()) != digest(tensor)


def test_channels_last_changes_nothing():
    images = some(torch.float32, 2, 3, 4, 4)
    assert digest(images.contiguous(memory_format=torch.channels_last)) == digest(images)


def test_conjugated_and_negated_views_have_digests():
    numbers = some(torch.complex64, 4)
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj().clone())
    assert digest(numbers.conj()) != digest(numbers)
    assert digest(numbers.conj().imag) == digest(-numbers.imag.clone())


def test_gradients_do_not_matter():
    tensor = some(torch.float32, 5)
    assert digest(tensor.clone().requires_grad_()) == digest(tensor)


def by_hand(name, values, row, piece):
    """A sum of a digest, by the definition."""
    key = zlib.crc32(repr([(name, len(values))]).encode())
    total = derive_seed(key, -1, row) | 1
    for place, word in enumerate(values):
        number, within = divmod(place, piece)
        factor = derive_seed(within, state=derive_seed(row + 1)) | 1
        signed = word - (1 << 64) if word >> 63 else word
        total += (signed >> 32 * row) * factor * (derive_seed(key, number, row) | 1)
    return total & MASK


def test_a_digest_is_its_definition(monkeypatch):
    values = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(1))
    words = [int(value) & MASK for value in values]
    for piece in (1 << 15, 64):
        monkeypatch.setattr(module, "piece_length", lambda device, piece=piece: piece)
        module._factors.cache_clear()
        found = [int(number) & MASK for number in fold({"a": values})]
        assert found == [by_hand("a", words, row, piece) for row in (0, 1)]
    module._factors.cache_clear()


def test_large_tensors_small_tensors_and_all_kinds_of_numbers_are_digested(monkeypatch):
    monkeypatch.setattr(module, "SMALL", 10)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    tensors = {str(kind): torch.arange(size).to(kind) for kind in kinds for size in (3, 11)}
    tensors |= {f"large {kind}": torch.arange(37).to(kind)[1:] for kind in kinds}  # not where a word begins
    whole = fold(tensors)
    for name, tensor in tensors.items():
        other = tensors | {name: torch.cat([tensor[:-1], (~tensor if tensor.dtype is torch.bool else tensor + 1)[-1:]])}
        assert not torch.equal(fold(other), whole), name
    assert not torch.equal(fold({"a": torch.zeros(3)}), fold({"a": torch.zeros(4)}))
    assert not torch.equal(fold({"a": torch.zeros(3)}), fold({}))


def test_empty_and_zero_dimensional_tensors_have_digests():
    assert digest(torch.empty(0)) == digest(torch.empty(3, 0, dtype=torch.int64))
    assert digest(torch.tensor(2.0)) == digest(torch.tensor([2.0]))
    assert digest(torch.tensor(2.0)) != digest(torch.tensor(3.0))
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_every_length_differs_whatever_the_bits_are(dtype):
    for value in (0, -1):
        filled = [
            torch.full((length,), value, dtype=torch.int64 if dtype == torch.int64 else torch.int32).view(dtype)
            for length in range(6)
        ]
        assert len({digest(tensor) for tensor in filled}) == 6


def test_a_batch_is_the_tensors_in_it_in_their_order():
    a, b = some(torch.float32, 3), some(torch.float32, 3, seed=1)
    known = {digest_of_batch(batch) for batch in ([a, b], [b, a], [a], {"x": b}, [a, a])}
    assert len(known) == 5
    assert digest_of_batch([a, b]) == digest_of_batch({"x": a.clone(), "y": (b.clone(), "name")})
    assert digest_of_batch(["no tensor"]) == digest_of_batch([])


def test_quick_sums_are_those_of_rows_and_columns_and_what_is_left():
    words = torch.randint(-(2**63), 2**63 - 1, (3 * 64 * 256 + 5,), generator=torch.Generator().manual_seed(1))
    sums = []
    for matrix in words[:-5].view(3, 64, 256).tolist():
        sums += [sum(column) for column in zip(*matrix, strict=True)] + [sum(row) for row in matrix]
    expected = torch.tensor([(number + 2**63) % 2**64 - 2**63 for number in sums] + words[-5:].tolist())
    assert torch.equal(quick_sums(words), expected)
    assert torch.equal(quick_sums(words.view(torch.bfloat16)), expected)
    for dtype, places in ((torch.float32, [1, 3]), (torch.bfloat16, [3, 7, 1027]), (torch.float64, [0, 256])):
        other = words.clone().view(dtype)
        other[places] = -other[places]
        assert not torch.equal(quick_sums(other), expected)
    length = module.piece_length(words.device)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        tensor = torch.arange(2 * length + 3).to(dtype)
        assert torch.equal(torch.cat([quick_sums(piece) for piece in tensor.split(length)]), quick_sums(tensor))
