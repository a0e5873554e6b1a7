"""Kept features: the same training, bit for bit, whatever is kept, and whatever was killed when."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.features import KeptFeatures, batch_entries, weights_digest
from lockstep_recipes.tasks.ct.losses import answer_loss
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.task import VolumeRisk
from tests.processes import HANG_S
from tests.volume_cases import make_batch, make_model, make_volumes

COUNTS = (5, 2, 9)


@pytest.fixture
def kept(tmp_path):
    return KeptFeatures("windows of a test", tmp_path)


def frozen_model(**options):
    model = make_model(dtype=torch.float32, dropout=0.3, **options)
    model.backbone.requires_grad_(False)
    return model.train()


def batch_of(kept, volumes, chosen):
    """What a task's `prepare` and `collate` do: the pixels of the slices that are not kept."""
    rows, slices, parts = [], [], []
    for number, (volume, numbers) in enumerate(zip(volumes, chosen, strict=True)):
        row = kept.look_up(f"volume-{number}", numbers)
        rows.append(row)
        slices.append(volume[0][row.missing])
        parts.append((volume[0][numbers], volume[1][numbers], volume[2]))
    return make_batch(parts) | {"slices": torch.cat(slices)} | batch_entries(rows)


def train(model, kept, steps=6, seed=0):
    """Weights after some steps on random slices, and the number of slices whose pixels were needed in each step."""
    volumes = make_volumes(*COUNTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    needed = []
    for step in range(steps):
        chosen = [torch.randperm(count, generator=generator)[:4].sort().values.tolist() for count in COUNTS]
        batch = make_batch([(s[n], p[n], y) for (s, p, y), n in zip(volumes, chosen, strict=True)])
        if kept is not None:
            batch = batch_of(kept, volumes, chosen)
        needed.append(len(batch["slices"]))
        torch.manual_seed(step)
        features = model.slice_features(batch)
        if kept is not None:
            kept.update(model, batch, features)
        answer_loss(model(batch, features).logits, batch["labels"], reduction="question").backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, needed


def test_training_is_bit_identical_with_and_without_kept_features(kept):
    plain, every = train(frozen_model(), None)
    first, needed = train(frozen_model(), kept)
    assert all(torch.equal(plain[name], first[name]) for name in plain)
    assert needed[0] == every[0]
    assert sum(needed) < sum(every)
    again, needed = train(frozen_model(), kept)  # a process that goes on: its workers know the folder
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert sum(needed) == 0


def test_a_new_process_finds_what_an_earlier_one_has_kept(kept, tmp_path):
    plain, every = train(frozen_model(), kept)
    later = KeptFeatures("windows of a test", tmp_path)
    assert not later.is_open
    weights, needed = train(frozen_model(), later)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert needed == [every[0], 0, 0, 0, 0, 0]
    assert later.folder == kept.folder


def test_a_damaged_or_missing_vector_is_computed_again(kept):
    plain, _ = train(frozen_model(), kept)
    files = sorted(kept.folder.rglob("*.rows"))
    assert len(files) == 3
    content = bytearray(files[0].read_bytes())
    content[20] ^= 1
    files[0].write_bytes(content[: len(content) - 7])
    files[1].unlink()
    weights, needed = train(frozen_model(), kept)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert sum(needed) > 0
    assert sum(train(frozen_model(), kept)[1]) == 0


def test_other_weights_settings_and_number_formats_have_folders_of_their_own(tmp_path):
    folders = []
    for setting, seed, dtype in (("a", 0, None), ("a", 1, None), ("b", 0, None), ("a", 0, torch.bfloat16)):
        kept = KeptFeatures(setting, tmp_path)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            train(frozen_model(seed=seed), kept, steps=1)
        folders.append(kept.folder)
    assert len(set(folders)) == 4


def test_float64_features_are_kept_as_float64(kept):
    model = make_model()
    model.backbone.requires_grad_(False)
    volumes = make_volumes(4)
    batch = batch_of(kept, volumes, [[0, 2]])
    features = model.slice_features(batch)
    kept.update(model, batch, features)
    batch = batch_of(kept, volumes, [[0, 1, 2]])
    assert batch["features"].dtype == torch.float64
    assert batch["is_kept"].tolist() == [True, False, True]
    whole = model.slice_features(batch)
    assert torch.equal(whole[[0, 2]], features)


def test_look_ups_end_when_the_backbone_trains(kept):
    model, volumes = frozen_model(), make_volumes(*COUNTS)
    chosen = [[0, 1]] * 3
    for _ in range(2):
        batch = batch_of(kept, volumes, chosen)
        kept.update(model, batch, model.slice_features(batch))
    assert len(batch["slices"]) == 0
    model.backbone.requires_grad_(True)
    with pytest.raises(UsageError, match=r"the backbone trains, but the batch contains features that were cached"):
        model.slice_features(batch)
    plain = make_batch([(s[:2], p[:2], y) for s, p, y in volumes])
    kept.update(model, plain, model.slice_features(plain))
    assert not kept.is_open
    assert "features" not in batch_of(kept, volumes, chosen)


def test_a_folder_that_cannot_be_written_changes_nothing_but_a_warning(tmp_path):
    plain, every = train(frozen_model(), None)
    (tmp_path / "file").write_text("")
    kept = KeptFeatures("a", tmp_path / "file")
    with pytest.warns(
        RuntimeWarning, match=r"cannot be written .* training continues, and computes missing features in every epoch"
    ):
        weights, needed = train(frozen_model(), kept)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert needed == every
    assert kept.stopped


def test_workers_learn_from_the_process_with_the_model(kept):
    """A forked process sees what `update` did after the fork."""
    context = torch.multiprocessing.get_context("fork")
    ask, answer = context.Queue(), context.Queue()

    def work():
        while ask.get():
            answer.put(kept.look_up("volume-0", [0, 1, 2, 3]).missing)

    worker = context.Process(target=work, daemon=True)
    worker.start()
    ask.put(True)
    assert answer.get(timeout=HANG_S) == [0, 1, 2, 3]
    model, volumes = frozen_model(), make_volumes(4)
    batch = batch_of(kept, volumes, [[1, 3]])
    kept.update(model, batch, model.slice_features(batch))
    ask.put(True)
    assert answer.get(timeout=HANG_S) == [0, 2]
    ask.put(False)
    worker.join(HANG_S)


def test_a_task_makes_its_object_before_workers_are_forked():
    task = VolumeRisk(VolumeRiskOptions(frozen_epochs=1), train="labels.csv", eval="other.csv")
    assert isinstance(vars(task)["_features"], KeptFeatures)


@pytest.mark.exhaustive
def test_a_kill_while_vectors_are_written_leaves_nothing_wrong(tmp_path):
    """A process writes vectors without end, and is killed. What is found afterwards is right, or not there."""
    code = f"""
        import torch
        from pathlib import Path
        from lockstep_recipes.tasks.ct.features import KeptFeatures
        kept = KeptFeatures("a", Path({str(tmp_path)!r}))
        kept._shared[1], kept._shared[2], kept._shared[0] = 50_000, 4, 1
        rows = torch.arange(20.0)[:, None].expand(20, 50_000).contiguous().numpy()
        print("begun", flush=True)
        volume = 0
        while True:
            kept._write(f"volume-{{volume}}", list(range(20)), rows)
            volume += 1
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    kept = KeptFeatures("a", tmp_path)
    kept._shared[1], kept._shared[2], kept._shared[0] = 50_000, 4, 1
    found = 0
    while not found:
        found = sum(kept.look_up("volume-0", range(20)).is_kept.tolist())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for file in kept.folder.rglob("*.rows"):
        rows = kept.look_up(file.stem, range(20))
        for number, is_kept in enumerate(rows.is_kept.tolist()):
            assert (rows.features[number] == number * is_kept).all()


def test_the_digest_of_weights_is_that_of_their_bits():
    digests = {weights_digest(make_model(seed=seed, dtype=dtype).backbone) for seed in (0, 1) for dtype in
               (torch.float32, torch.float64)}  # fmt: skip
    assert len(digests) == 4
    assert weights_digest(make_model().backbone) == weights_digest(make_model().backbone)
