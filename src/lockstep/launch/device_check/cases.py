"""Operations with known results, in each number format.

There are two kinds. **Exact** cases compute with small integers. The format can represent every intermediate sum, so
there is a single correct answer, for every order of additions and on every device. The other cases compute with
numbers that use all bits of the format. Their results must be within a bound of a float64 result on the CPU, and must
be bitwise equal each time, and on all devices of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats by name. `tf32` is fp32 with `allow_tf32`, only on CUDA."""
_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance from 1 to the next number: the largest relative error of rounding."""
_UNIT_TF32 = 2.0**-11
_LARGEST = {torch.float64: 1 << 20, torch.float32: 64, torch.bfloat16: 1, torch.float16: 1}
"""Exact products have integer entries up to this size. A sum of 2,048 products stays below 2**53 and 2**24; with
entries of 0 and 1 it stays below 256 in all cases here, which bf16 represents exactly."""


@dataclass(frozen=True)
class Case:
    """An operation with fixed inputs and a known result."""

    name: str
    format: str
    """`bf16`, for example."""
    inputs: tuple[Tensor, ...]
    """On the CPU."""
    compute: Callable[..., Tensor]
    """From the inputs, on any device, to the result."""
    right: Tensor
    """The result in float64, on the CPU."""
    bound: Tensor | None
    """The largest distance from `right`, for each element. None: the result must be equal."""

    @property
    def label(self) -> str:
        """The name and the format."""
        return f"{self.name} {self.format}"


def cases(size: int, *, has_float64: bool = True, has_tf32: bool = False) -> Iterator[Case]:
    """All cases.

    Args:
        size: rows and columns of matrices: at most 2,048.
        has_float64: whether the device computes in float64.
        has_tf32: whether the device has tf32.
    """
    formats = {name: dtype for name, dtype in FORMATS.items() if has_float64 or name != "fp64"}
    for name, dtype in formats.items():
        yield _exact_product(name, dtype, size)
        yield _product(name, dtype, size, _UNIT[dtype])
    if has_tf32:
        yield _exact_product("tf32", torch.float32, size, product=_in_tf32(torch.matmul))
        yield _product("tf32", torch.float32, size, _UNIT_TF32, product=_in_tf32(torch.matmul))
    for name in ("fp32", "bf16", "fp16"):
        yield _convolution(name, FORMATS[name], max(size // 16, 8))
        yield _attention(name, FORMATS[name], max(size // 4, 16))
    yield _elementwise(size)
    yield _normalisation(size)
    yield _update(size)
    yield _sum(size)
    yield _scatter(size)
    yield _sort(size)
    yield _copy(size)


def _whole(size: tuple[int, ...], largest: int, seed: int) -> Tensor:
    """Integers from -largest to largest, in float64: the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, size, generator=generator).double()


def _all_bits(size: tuple[int, ...], seed: int) -> Tensor:
    """Numbers from -1 to 1 with 30 random bits, in float64. No CPU function that could round is called."""
    return _whole(size, 1 << 30, seed) / (1 << 30)


def _in_tf32(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(*inputs: Tensor) -> Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return compute(*inputs)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return computed


def _exact_product(name: str, dtype: torch.dtype, size: int, product: Callable[..., Tensor] = torch.matmul) -> Case:
    left, right = (_whole((size, size), _LARGEST[dtype], seed) for seed in (1, 2))
    return Case("whole products", name, (left.to(dtype), right.to(dtype)), product, left @ right, None)


def _product(
    name: str, dtype: torch.dtype, size: int, unit: float, product: Callable[..., Tensor] = torch.matmul
) -> Case:
    """The error is at most K * u of the accumulator, and u of tf32's inputs and of the result (Higham 2002, 3.5)."""
    left, right = (_all_bits((size, size), seed).to(dtype) for seed in (3, 4))
    exact, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    accumulated = _UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    bound = 2 * (size * accumulated + 2 * unit) * magnitude
    return Case("products", name, (left, right), product, exact, bound)


def _convolution(name: str, dtype: torch.dtype, size: int) -> Case:
    """A convolution, and its gradients. Winograd kernels add larger numbers: 16 times the bound of a sum."""
    images, weights = _all_bits((4, 8, size, size), 5).to(dtype), _all_bits((8, 8, 3, 3), 6).to(dtype)

    def compute(images: Tensor, weights: Tensor) -> Tensor:
        images, weights = images.detach().requires_grad_(), weights.detach().requires_grad_()
        with torch.enable_grad():
            found = functional.conv2d(images, weights, padding=1)
            gradients = torch.autograd.grad(found, (images, weights), torch.ones_like(found))
        return torch.cat([part.detach().flatten() for part in (found, *gradients)])

    right = compute(images.double(), weights.double())
    terms = max(8 * 9, 4 * size * size)  # of an element of the result, of a gradient of the weights
    magnitude = compute(images.double().abs(), weights.double().abs())
    bound = (16 * terms * _UNIT[torch.float32] + 4 * _UNIT[dtype]) * magnitude
    return Case("convolution", name, (images, weights), compute, right, bound)


def _attention(name: str, dtype: torch.dtype, size: int) -> Case:
    """Averages of values: an error of a weight is relative to the values, which are at most 1."""
    queries, keys, values = (_all_bits((2, 4, size, 32), seed).to(dtype) for seed in (7, 8, 9))

    def compute(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    right = compute(queries.double(), keys.double(), values.double())
    bound = torch.full_like(right, 64 * _UNIT[dtype] + 4 * size * _UNIT[torch.float32])
    return Case("attention", name, (queries, keys, values), compute, right, bound)


def _elementwise(size: int) -> Case:
    """Functions of single numbers. Libraries guarantee a few units in the last place each."""
    numbers = _all_bits((size, size), 10).float()

    def compute(x: Tensor) -> Tensor:
        positive = x.abs() + 0.5
        return torch.stack([x.exp(), positive.log1p(), positive.sqrt(), x / positive, x.tanh(), torch.erf(x), x.sin()])

    right = compute(numbers.double())
    return Case("functions", "fp32", (numbers,), compute, right, 16 * _UNIT[torch.float32] * (right.abs() + 1))


def _normalisation(size: int) -> Case:
    numbers = _all_bits((size, size), 11).float()

    def compute(x: Tensor) -> Tensor:
        return torch.stack([functional.layer_norm(x, (size,)), x.softmax(1), x.log_softmax(1)])

    right = compute(numbers.double())
    return Case("norms", "fp32", (numbers,), compute, right, 4 * size * _UNIT[torch.float32] * (right.abs() + 1))


def _update(size: int) -> Case:
    """An update of AdamW from a state in which its terms have the same magnitude."""
    weights, gradients, first = (_all_bits((size, size), seed).float() for seed in (12, 13, 14))
    second = _all_bits((size, size), 15).float().square()

    def compute(weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor) -> Tensor:
        mean = first * 0.9 + gradients * 0.1
        scale = (second * 0.999 + gradients * gradients * 0.001).sqrt() + 1e-3
        return torch.stack([weights * 0.99 - 1e-2 * mean / scale, mean, scale])

    inputs = (weights, gradients, first, second)
    right = compute(*(tensor.double() for tensor in inputs))
    # The quotient is at most 1e-2 * 1 / 1e-3 = 10, which is also the factor of an error of `scale`.
    return Case("update", "fp32", inputs, compute, right, torch.full_like(right, 256 * _UNIT[torch.float32]))


def _sum(size: int) -> Case:
    numbers = _whole((size, size), 16, 16)

    def compute(x: Tensor) -> Tensor:
        return torch.cat([x.sum(0), x.sum(1), x.amax(0), x.cumsum(1)[:, -1], x.sum().reshape(1)])

    return Case("sums", "fp32", (numbers.float(),), compute, compute(numbers), None)


def _scatter(size: int) -> Case:
    """Integers that are added at positions: atomic additions may come in any order."""
    numbers = _whole((size * 16,), 8, 17)
    places = _whole((size * 16,), 1 << 20, 18).abs().long() % size

    def compute(numbers: Tensor, places: Tensor) -> Tensor:
        return numbers.new_zeros(size).index_add(0, places, numbers)

    return Case("scatter", "fp32", (numbers.float(), places), compute, compute(numbers, places), None)


def _sort(size: int) -> Case:
    numbers = _whole((size, size), 1 << 20, 19)

    def compute(x: Tensor) -> Tensor:
        return x.sort(1).values

    return Case("sort", "fp32", (numbers.float(),), compute, compute(numbers), None)


def _copy(size: int) -> Case:
    """A copy on the device: together with transferring inputs and result, it tests the bus."""
    numbers = _whole((size, 4 * size), 1 << 24, 20)
    return Case("copy", "fp32", (numbers.float(),), torch.clone, numbers, None)


def first_wrong(case: Case, result: Tensor) -> str | None:
    """The first wrong element of `result`, in words. None: all are correct.

    Args:
        result: on the CPU.
    """
    distance = (result.double() - case.right).abs()
    wrong = ~(distance <= (0 if case.bound is None else case.bound))  # NaN is wrong
    if not bool(wrong.any()):
        return None
    place = int(wrong.flatten().nonzero()[0])
    return described(result, case.right, place, int(wrong.sum()))


def described(result: Tensor, right: Tensor, place: int, count: int) -> str:
    """A wrong element, in words.

    Args:
        place: position of the element in the flattened tensors.
        count: number of wrong elements.
    """
    index = tuple(int(number) for number in torch.unravel_index(torch.tensor(place), result.shape))
    found, expected = float(result.flatten()[place]), float(right.flatten()[place])
    more = f", and {count - 1} more" if count > 1 else ""
    bits = _bits(result.flatten()[place], right.flatten()[place])
    return f"element {index} is {found!r}, should be {expected!r}{bits}{more}"


def _bits(found: Tensor, right: Tensor) -> str:
    """Which bits differ, if the format can represent `right`."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[found.element_size()]
    rounded = right.to(found.dtype)
    if math.isnan(float(right)) or float(rounded) != float(right):
        return ""
    width = 8 * found.element_size()
    differing = (int(found.reshape(1).view(integers)) ^ int(rounded.reshape(1).view(integers))) % (1 << width)
    places = [place for place in range(width) if differing >> place & 1]
    return f" (bit {places[0]} of {width} differs)" if len(places) == 1 else f" ({len(places)} of {width} bits differ)"
