"""Models that cannot be loaded: how long it takes until the error comes, and what it says."""

import pytest

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks import hugging_face
from lockstep_recipes.tasks.vision.image_models import processor_of

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def modes(monkeypatch):
    """Whether the hub's libraries were offline in each call of `from_pretrained`, which fails."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = []

    def loading(name, **_):
        found.append(constants.HF_HUB_OFFLINE)
        raise OSError(f"no {name}")

    monkeypatch.setattr("transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict", loading)
    return found, loading


class Reachable:
    def head(self, *_, **__):
        pass


def unreachable():
    raise OSError("no network")


def test_without_a_network_a_misspelt_model_is_looked_for_in_the_cache_alone(modes, monkeypatch):
    found, loading = modes
    monkeypatch.setattr(hub, "get_session", unreachable)
    with pytest.raises(
        UsageError, match=r"as a folder .*restnet-18, .*which cannot be reached: OSError.*no restnet-18"
    ):
        hugging_face.load(loading, "config", "restnet-18")
    assert processor_of("restnet-18") == {}
    assert found == [True, True]
    assert not constants.HF_HUB_OFFLINE


def test_with_a_network_or_a_folder_nothing_is_changed(modes, monkeypatch, tmp_path):
    found, loading = modes
    monkeypatch.setattr(hub, "get_session", Reachable)
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        hugging_face.load(loading, "config", "restnet-18")
    assert "cannot be reached" not in str(caught.value)
    monkeypatch.setattr(hub, "get_session", unreachable)
    with pytest.raises(UsageError, match="in the folder"):
        hugging_face.load(loading, "config", tmp_path)
    assert processor_of(str(tmp_path)) == {}
    assert found == [False, False, False]
