"""Whatever a sample or a batch contains can be compared, described, copied, handed over and looked at for changes."""

import collections
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from lockstep.core.data import difference, handover
from lockstep.core.data.device_copies import DeviceCopies
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.tensors import is_plain, to_cpu, values_of
from lockstep.parts.checks.untouched_data import _memory
from lockstep.parts.digest import digest_of_batch
from tests import own_tasks, runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about kinds that may change
Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Record:
    values: torch.Tensor
    name: Any = None


class Graph:
    """As those of torch_geometric: it moves itself, and its repr has no numbers."""

    def __init__(self, x):
        self._store = {"x": x, "y": None}

    def to(self, device, **options):
        return Graph(self._store["x"].to(device, **options))

    def __repr__(self):
        return "Graph(x=[3])"


def nested(value, layout, **options):
    return torch.nested.nested_tensor([torch.full((size, 3), value) for size in (2, 4)], layout=layout, **options)


TENSORS = {
    "jagged": lambda v: nested(v, torch.jagged),
    "nested": lambda v: nested(v, torch.strided),
    "jagged, with gradient": lambda v: nested(v, torch.jagged, requires_grad=True),
    "sparse": lambda v: (torch.eye(3) * v).to_sparse(),
    "sparse, rows": lambda v: (torch.eye(3) * v).to_sparse_csr(),
    "sparse, blocks": lambda v: (torch.eye(4) * v).to_sparse_bsr((2, 2)),
    "sparse, twice": lambda v: torch.sparse_coo_tensor([[0, 0], [1, 1]], [v, v], (3, 3)),
    "quantized": lambda v: torch.quantize_per_tensor(torch.full((3,), v), 0.1, 0, torch.qint8),
    "complex": lambda v: torch.full((3,), v) * (1 + 2j),
    "conjugate": lambda v: (torch.full((3,), v) * (1 + 2j)).conj(),
    "negative": lambda v: (torch.full((3,), v) * (1 + 2j)).conj().imag,
    "bfloat16": lambda v: torch.full((3,), v, dtype=torch.bfloat16),
    "float8": lambda v: torch.full((3,), v).to(torch.float8_e4m3fn),
    "uint16": lambda v: torch.full((3,), int(v), dtype=torch.uint16),
    "scalar": torch.tensor,
    "expanded": lambda v: torch.tensor(v).expand(3, 2),
    "a view": lambda v: torch.full((4, 4), v)[::2, 1:],
    "images": lambda v: torch.full((2, 3, 4, 4), v),
    "parameter": lambda v: torch.nn.Parameter(torch.full((3,), v)),
}
HOLDERS = {
    "named tuple": lambda v: Pair(torch.full((3,), v), None),
    "dataclass": lambda v: Record(torch.full((3,), v), "x"),
    "dict": lambda v: {"a": None, 3: torch.full((3,), v), None: "x"},
    "deque": lambda v: collections.deque([torch.full((3,), v)]),
    "user list": lambda v: collections.UserList([torch.full((3,), v)]),
    "user dict": lambda v: collections.UserDict(a=torch.full((3,), v)),
    "packed": lambda v: pack_sequence([torch.full((3,), v), torch.full((2,), v)]),
    "graph": lambda v: Graph(torch.full((3,), v)),
}
OTHERS = {
    "image": lambda v: Image.new("RGB", (4, 3), int(v)),
    "texts": lambda v: ["a", str(v)],
    "bytes": lambda v: bytes([int(v)]),
    "byte array": lambda v: bytearray([int(v)]),
    "texts of NumPy": lambda v: np.array(["a", str(v)]),
    "objects of NumPy": lambda v: np.array([torch.tensor(v), None], dtype=object),
    "fields of NumPy": lambda v: np.array([(1, v)], dtype=[("a", "i4"), ("b", "f4")]),
    "masked array": lambda v: np.ma.array([1.0, 2.0], mask=[v > 1, False]),
    "date": lambda v: np.datetime64(f"2020-01-0{int(v)}"),
    "range": lambda v: range(int(v)),
}
KINDS = TENSORS | HOLDERS | OTHERS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_compared_by_its_content(kind):
    one, again, other = (KINDS[kind](value) for value in (1.0, 1.0, 2.0))
    assert digest_of(one) == digest_of(again)
    assert digest_of({"x": one}) != digest_of({"x": other})
    text = difference.first(difference.record(one), difference.record(other), ("rank 0", "rank 1"))
    assert text.startswith(("sample", "the difference is beyond"))
    assert list(_memory(one)) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_copied_and_handed_over_as_it_is(kind):
    batch = {"x": KINDS[kind](1.0)}
    for channels_last in (False, True):
        copied = DeviceCopies(torch.device("cpu"), channels_last=channels_last).begin(batch).wait()
        assert digest_of(copied) == digest_of(batch)
    assert digest_of(to_cpu(batch)) == digest_of(batch)
    if kind != "jagged, with gradient":  # an activation, which no process can hand over
        handed = pickle.loads(pickle.dumps(handover.Packed(batch, "batch", "Task.collate")))
        assert digest_of(handed) == digest_of(batch)


@pytest.mark.parametrize(
    "kind", [*TENSORS, "named tuple", "dataclass", "dict", "deque", "user list", "user dict", "packed"]
)
def test_the_watch_sees_the_values_of_each_kind(kind):
    one, again, other = (digest_of_batch({"x": KINDS[kind](value)}) for value in (1.0, 1.0, 2.0))
    assert one == again != other


def test_sizes_of_nested_tensors_count_and_tensors_without_values_are_compared_by_shape():
    sizes = [(2, 4), (4, 2), (6,)]
    made = [torch.nested.nested_tensor([torch.zeros(n, 3) for n in each], layout=torch.jagged) for each in sizes]
    assert len(set(map(digest_of, made))) == 3
    assert digest_of(torch.empty(3, device="meta")) != digest_of(torch.empty(4, device="meta"))
    assert values_of(torch.empty(3, device="meta")) == []
    assert not is_plain(torch.empty(3, device="meta"))
    blue, red = (Image.new("P", (2, 2)) for _ in range(2))
    blue.putpalette([0, 0, 255] * 256), red.putpalette([255, 0, 0] * 256)
    assert digest_of(blue) != digest_of(red)


class Bags(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((1 + index % 5, 3), float(index % 7), dtype=torch.float64)


class Jagged(own_tasks.Plain):
    """Each sample is a list of points. A batch is one jagged tensor."""

    def model(self):
        return torch.nn.Linear(3, 1).double()

    def train_data(self):
        return Bags()

    def eval_data(self):
        return Bags()

    def collate(self, samples):
        return torch.nested.nested_tensor(samples, layout=torch.jagged)

    def weight(self, batch):
        return batch.size(0)

    def loss(self, model, batch):
        return torch.stack([(model(bag / 7).mean() - bag.mean()) ** 2 for bag in batch.unbind()]).sum()

    def predict(self, model, batch):
        return torch.stack([model(bag / 7).mean() for bag in batch.unbind()])


@pytest.mark.parametrize("workers", [0, 2])
def test_jagged_batches_train(workers, tmp_path):
    settings = runs.config(
        train={"steps": 4, "eval_every_steps": 4}, batch={"global": 8, "micro": 4}, data={"workers": workers}
    )
    weights, _ = runs.fit(Jagged(), settings, tmp_path)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert "step 4/4" in (tmp_path / "train.log").read_text()
