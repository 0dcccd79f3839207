"""`--from RUN@STEP`: a new run that begins with the adapter of a committed step, under any config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argusrl.config.sections import Config
from argusrl.errors import ConfigError
from argusrl.journal.commits import CommitChain
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import verify_manifest


def forked(config: Config, origin: str) -> tuple[Config, dict[str, Any]]:
    """The config of the fork, and where it comes from (for fork.json).

    The new run starts from the committed adapter with a fresh optimizer; its prompt order is its own. Raises
    ConfigError when there is no such run, step or adapter.
    """
    name, separator, text = origin.rpartition("@")
    if not name or not separator or not text.isdecimal():
        raise ConfigError(f"--from {origin}: must be RUN@STEP, e.g. quickstart@20")
    step = int(text)
    places = [RunFolder(path.absolute()) for path in (Path(config.run.root) / name, Path(name))]
    folder = next((place for place in places if place.config.exists()), None)
    if folder is None:
        raise ConfigError(f"--from {origin}: there is no run {places[0].path}", "argusrl runs list shows the runs")
    if config.adapter.kind != "lora":
        raise ConfigError(f"--from {origin}: only adapter.kind lora can begin with the adapter of a run")
    chain = CommitChain(folder)
    head = chain.head()
    if head is None or step > head.step:
        raise ConfigError(f"--from {origin}: the last committed step is {head.step if head else 'none'}")
    commit = chain.read(step)
    adapter = folder.absolute(commit.adapter.path)
    if not adapter.is_dir():
        raise ConfigError(
            f"--from {origin}: the adapter of step {step} was removed by retention",
            "raise checkpoint.keep_adapters to keep more, or fork from a later step",
        )
    verify_manifest(adapter)
    section = config.adapter.model_copy(update={"initial": adapter})
    fork = {"run": str(folder.path), "step": step, "adapter_sha256": commit.adapter.sha256}
    return config.model_copy(update={"adapter": section}), fork
