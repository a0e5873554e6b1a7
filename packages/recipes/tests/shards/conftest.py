import pytest

from lockstep_recipes.shards import files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "WAITS_S", (0.0, 0.0, 0.0))
