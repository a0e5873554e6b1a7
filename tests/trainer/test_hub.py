"""Uploads to a stand-in of the hub, with the client that users have."""

import pytest

from lockstep import LockstepError
from lockstep.trainer import hub
from tests import hub_server


@pytest.fixture
def server(monkeypatch):
    with hub_server.running() as running:
        hub_server.use(running, monkeypatch)
        yield running


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "llama"}')
    (out / "model.safetensors").write_bytes(bytes(range(256)))
    return out


def check(name, kind="lm", private=False, optimizer=False):
    hub.check(name, kind, private=private, optimizer=optimizer)


@pytest.mark.cases("our-lab")
@pytest.mark.parametrize("owner", ["someone", "our-lab"])
def test_a_folder_is_uploaded_whole(server, folder, owner):
    check(f"{owner}/plays", private=True)
    assert hub.push(folder, f"{owner}/plays", private=True) == f"{server.address}/{owner}/plays"
    assert server.repositories == {f"{owner}/plays": {"private": True}}
    assert server.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "config.json").write_text("{}")
    hub.push(folder, f"{owner}/plays", private=False)  # into the repository that is there
    assert server.files["config.json"] == b"{}"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("plays", {}, "the name has no owner"),
        ("some one/plays", {}, "Repo id must use alphanumeric chars"),
        ("someone/a/b", {}, "Repo id must be in the form"),
        (
            "somebody/plays",
            {},
            "the token of someone cannot write for somebody\n  remedy: give one of: someone, our-lab",
        ),
        (
            "someone/plays",
            {"kind": "volume_risk"},
            "an export of task.kind volume_risk is not a folder for transformers",
        ),
        ("someone/plays", {"optimizer": True}, "the file of --optimizer is not uploaded"),
        (None, {"private": True}, "--private: has no meaning without --push-to-hub"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_export(server, name, options, expected):
    with pytest.raises(LockstepError) as raised:
        check(name, **options)
    assert expected in str(raised.value)
    assert raised.value.exit_code == 2
    assert not server.repositories


def test_without_an_upload_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(hub, "_hub", lambda where: pytest.fail("the hub is not needed"))
    check(None)


def test_tokens_are_checked_before_the_export(server, monkeypatch, tmp_path):
    server.role = "read"
    with pytest.raises(LockstepError, match="the token can only read"):
        check("someone/plays")
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(LockstepError, match=f"the hub at {server.address} does not accept the token") as raised:
        check("someone/plays")
    assert "hf_of_nobody" not in str(raised.value)
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    with pytest.raises(LockstepError, match="there is no token of the hub\n  remedy: run `hf auth login`"):
        check("someone/plays")


def test_a_failed_upload_names_the_command_that_goes_on(server, folder):
    server.fails_at = "/commit/"
    with pytest.raises(LockstepError) as raised:
        hub.push(folder, "someone/plays", private=True)
    assert raised.value.exit_code == 1
    assert f"the export is in {folder}, but was not uploaded" in str(raised.value)
    assert f"upload it with: hf upload someone/plays {folder} . --private" in str(raised.value)
    assert (folder / "model.safetensors").is_file()


def test_a_folder_that_transformers_cannot_load_is_not_uploaded(server, folder):
    (folder / "config.json").unlink()
    with pytest.raises(
        LockstepError, match=r"has no config\.json, so transformers cannot load it: nothing was uploaded"
    ):
        hub.push(folder, "someone/plays", private=False)
    assert not server.repositories
