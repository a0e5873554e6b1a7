"""Every private name of torch that the package uses stands in the table below, and the installed torch has it.

`core/parallel/torch_internals.py` holds those that need more than a name, such as attributes of objects; its own tests
call each. `torch_private.py` and `torch_internals.py` of `lockstep_audit/observe` have what the audit asks;
packages/audit/tests tries all of it.
"""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

import lockstep
import lockstep_audit
import lockstep_lab
import lockstep_recipes

PACKAGES = [Path(package.__file__).parent for package in (lockstep, lockstep_recipes, lockstep_lab, lockstep_audit)]

PRIVATE = {
    "torch._C._cuda_attach_out_of_memory_observer": "snapshots of the memory of a GPU; CUDA builds alone have it",
    "torch._C._current_graph_task_id": "tells a forward pass from one that recomputation calls",
    "torch._C._distributed_c10d": "flight recorders, of which torch has no public reader",
    "torch._assert_async": "a check on a GPU for which nobody waits",
    "torch._foreach_copy_": "one call for all tensors of a parcel; torch.optim uses it",
    "torch._foreach_lerp_": "a moving average in one call; torch.optim uses it",
    "torch._foreach_norm": "norms in one call; clip_grad_norm_ uses it",
    "torch._subclasses.fake_tensor": "plans trace a model without memory",
    "torch.cuda.memory._dump_snapshot": "snapshots of the memory of a GPU; documented, although private",
    "torch.cuda.memory._record_memory_history": "the same",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "DCP's own tools read our checkpoints",
    "torch.distributed.distributed_c10d._abort_process_group": "leaving groups without waiting for their collectives",
    "torch.distributed.distributed_c10d._set_pg_timeout": "the timeout of a group that exists",
    "torch.distributed.distributed_c10d._world": "the audit: which groups a script has made",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "a cache that outlives the groups of a process",
    "torch.nn.modules.batchnorm._BatchNorm": "the base of all BatchNorms",
    "torch.nn.modules.batchnorm._NormBase": "the audit: layers with running statistics",
    "torch.nn.modules.instancenorm._InstanceNorm": "the base of all InstanceNorms",
    "torch.numa.binding._maybe_apply_numa_binding_to_current_process": "torchrun alone has public options for it",
    "torch.ops.aten._to_copy": "plans: casts of parameters in a trace",
    "torch.optim.optimizer._default_to_fused_or_foreach": "the watch makes an update as the optimizer did",
    "torch.testing._internal.distributed.fake_pg": "plans pretend many ranks in one process",
    "torch.utils._python_dispatch.TorchDispatchMode": "counting operations, and what verify sees of a step",
    "torch.utils._pytree": "batches and outputs of any nesting",
    "torch.utils.data._utils.signal_handling": "which loader worker died, and how",
}
"""A private name of torch, and what it is for. A name stands for all that lies within."""
IN_TEXTS = {
    "torch._dynamo": "preloaded, because the first step of an optimizer imports it",
    "torch._export": "a logger that is silenced while a program is exported",
    "torch._logging": "a logger that is silenced",
}
"""Private modules whose names stand in texts: they are imported by torch, or name a logger. One that is not there is
no error."""
ADAPTERS = (
    "lockstep/core/parallel/torch_internals.py",
    "lockstep/streams/torch_private.py",
    "lockstep_audit/observe/torch_internals.py",
    "lockstep_audit/observe/torch_private.py",
)


def names_of_torch(text):
    """The dotted names of torch that a module imports or uses, as far as they can be read from its text."""
    tree, known, found = ast.parse(text), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    known[one.asname or "torch"] = one.name if one.asname else "torch"
                    found.add(one.name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                found.add(f"{node.module}.{one.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in known:
                found.add(".".join([known[inner.id], *chain]))
    return found


def private_part(name):
    """The name up to and with its first private part; None if it is public. `__version__` is public."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if re.match(r"_(?!_)", part)), None)
    return None if place is None else ".".join(parts[: place + 1])


@functools.cache
def texts():
    """The text of each file, by its path below the folder of the package."""
    paths = [(package, path) for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    return {path.relative_to(package.parent).as_posix(): path.read_text() for package, path in paths}


@functools.cache
def used():
    """For each private name of torch, the files that use it."""
    found = {}
    for file, text in texts().items():
        for name in names_of_torch(text) if "torch" in text else ():
            if private_part(name):
                found.setdefault(name, set()).add(file)
    return found


def is_listed(name):
    return any(f"{name}.".startswith(f"{known}.") or f"{known}.".startswith(f"{name}.") for known in PRIVATE)


def test_every_private_name_that_is_used_is_listed():
    unknown = {name: files for name, files in used().items() if not is_listed(name) and files - set(ADAPTERS)}
    assert not unknown


def test_every_name_that_is_listed_is_used():
    names = used()
    whole = "".join(texts().values())
    unused = {
        known
        for known in PRIVATE
        if not any(f"{name}.".startswith(f"{known}.") for name in names) and f'"{known}"' not in whole
    }
    assert not unused


def test_private_modules_in_texts_are_listed():
    found = set()
    for file, text in texts().items():
        if file not in ADAPTERS:
            found |= set(re.findall(r'"(torch(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*)"', text))
    assert {name for name in found if not is_listed(name)} <= set(IN_TEXTS)


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_it(name):
    if name == "torch._C._cuda_attach_out_of_memory_observer":
        torch = importlib.import_module("torch")
        if torch.version.cuda is None:
            pytest.skip("this torch has no CUDA")
    assert found(name) is not None


def found(name):
    """The object of a dotted name: a module, or an attribute of one.

    Raises:
        AttributeError, ModuleNotFoundError: there is none.
    """
    parts = name.split(".")
    value, place = importlib.import_module(parts[0]), 1
    while place < len(parts):
        if not hasattr(value, parts[place]):  # torch.optim hides a module of its own
            value = importlib.import_module(".".join(parts[: place + 1]))
        else:
            value = getattr(value, parts[place])
        place += 1
    return value


def test_private_names_are_found_however_they_are_written():
    text = "import torch\nimport torch.distributed as dist\nfrom torch.utils import _pytree as tree\n"
    text += "from torch._subclasses.fake_tensor import FakeTensorMode\n"
    text += "def f(x):\n    torch._foreach_add_(x)\n    dist.distributed_c10d._world.pg_map\n    tree.tree_map(f, x)\n"
    private = {private_part(name) for name in names_of_torch(text)} - {None}
    assert private == {
        "torch._foreach_add_",
        "torch.distributed.distributed_c10d._world",
        "torch.utils._pytree",
        "torch._subclasses",
    }
    assert private_part("torch.__version__") is None
