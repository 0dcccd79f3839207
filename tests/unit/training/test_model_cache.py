from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from argusrl.config.sections import ModelSection
from argusrl.errors import ModelError
from argusrl.training.model_cache import fetch_model


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    assert fetch_model(ModelSection(path=str(tmp_path))) == tmp_path


def test_a_hub_model_is_fetched_at_its_revision(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, *, revision, allow_patterns: asked.append((name, revision, allow_patterns)) or str(tmp_path),
    )
    assert fetch_model(ModelSection(path="team/model", revision="abc")) == tmp_path
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("team/model", "abc")
    assert {"*.safetensors", "*.json"} <= set(patterns)


def test_what_is_not_in_the_cache_of_a_machine_without_network_is_told(monkeypatch):
    def refuse(*_, **__):
        raise LocalEntryNotFoundError("not in the cache\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"team/model cannot be fetched: not in the cache\n") as caught:
        fetch_model(ModelSection(path="team/model"))
    assert "HF_HOME" in caught.value.hint


def test_the_real_library_says_no_to_a_name_that_is_none():
    with pytest.raises(ModelError, match="cannot be fetched"):
        fetch_model(ModelSection(path=str(Path("not") / "a" / "hub" / "id")))
