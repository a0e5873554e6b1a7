"""A checkpoint is complete, or it does not exist."""

import json
from pathlib import Path

import pytest
import torch

from lockstep import LockstepError
from lockstep.checkpoint import state, store

OLD = {"weights": torch.arange(1000.0)}


@pytest.fixture
def folder(tmp_path):
    store.write(tmp_path, 1, OLD, {"skipped": 0})
    return tmp_path


def test_what_was_written_is_read(folder):
    found, manifest, complaints = store.newest(folder)
    assert torch.equal(found["weights"], OLD["weights"])
    assert manifest["step"] == 1
    assert manifest["skipped"] == 0
    assert complaints == []
    assert store.newest(folder / "nowhere") is None


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["mkdir", "torch.save", "_flush", "_digest", "json.dump", "_sync_folder", "rename"])
def test_failure_at_any_stage_keeps_the_checkpoint_before(folder, monkeypatch, place):
    with monkeypatch.context() as patch:
        if place in ("mkdir", "rename"):
            patch.setattr(Path, place, full_disk)
        else:
            patch.setattr(f"lockstep.checkpoint.store.{place}", full_disk)
        with pytest.raises(LockstepError, match=r"MiB free.*No space left on device"):
            store.write(folder, 2, {"weights": torch.zeros(3)}, {})
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert torch.equal(store.newest(folder)[0]["weights"], OLD["weights"])


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_folder_without_all_its_files_is_passed_over(folder, name):
    store.write(folder, 2, {"weights": torch.zeros(3)}, {})
    (folder / "step-00000002" / name).unlink()
    _, manifest, complaints = store.newest(folder)
    assert manifest["step"] == 1
    assert len(complaints) == (name == "state.pt")  # without a manifest it never was a checkpoint


@pytest.mark.parametrize("at", [0, 100, -1])
def test_flipped_byte_is_found(folder, at):
    store.write(folder, 2, {"weights": torch.zeros(3)}, {})
    path = folder / "step-00000002" / "state.pt"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    _, manifest, complaints = store.newest(folder)
    assert manifest["step"] == 1
    assert "step-00000002: state.pt differs from its checksum" in complaints[0]


def test_no_valid_checkpoint_at_all_is_an_error_not_a_fresh_start(folder):
    (folder / "step-00000001" / "state.pt").write_bytes(b"")
    with pytest.raises(LockstepError, match="no valid checkpoint is left"):
        store.newest(folder)


def test_only_the_last_are_kept(folder):
    for step in range(2, 7):
        store.write(folder, step, OLD, {}, keep_last=3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000005", "step-00000006"]


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = folder / "step-00000001"
    torch.save({"weights": Evil()}, path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.pt"] = store._digest(path / "state.pt")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        store.newest(folder)
    assert not (tmp_path / "ran").exists()


def test_state_goes_by_parameter_name_not_by_order():
    def make(groups):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": [parameters[number] for number in group]} for group in groups])
        return model, optimizer

    model, optimizer = make([[0, 1], [2, 3]])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other, other_optimizer = make([[3], [2, 0, 1]])  # as if the groups of the config had changed
    state.restore(state.capture(model, optimizer), other, other_optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], other_optimizer.state[theirs]["exp_avg"])
