"""A hub model is fetched once, before the ranks and engines of all nodes ask for it at the same time.

It lies in HF_HOME; a folder that all nodes see (what `argusrl cluster manifest` sets) keeps it for every run.
"""

from __future__ import annotations

from pathlib import Path

from argusrl.config.sections import ModelSection
from argusrl.errors import ModelError

_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]


def fetch_model(section: ModelSection) -> Path:
    """The model's folder: the one that was given, or the one in the cache. Raises ModelError.

    Two processes that fetch the same model wait for each other; what is there already is not fetched again.
    """
    if Path(section.path).is_dir():
        return Path(section.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(section.path, revision=section.revision, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.path: {section.path} cannot be fetched: {str(error).splitlines()[0]}",
            "give a folder, or a hub id that this machine can read (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME)",
        ) from error
