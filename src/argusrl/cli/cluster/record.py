"""What a run folder says, wherever it is seen: here, or by a pod of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argusrl.errors import ArgusError, ConfigError

if TYPE_CHECKING:
    from argusrl.cluster.kube_api import KubeApi
    from argusrl.cluster.overview import RunOverview

_ASK_SECONDS = 60.0  # Python and the libraries start slowly on a busy head


def find_run(kube: KubeApi, run: str | None, root: Path | None) -> RunOverview:
    """A run by its objects in the cluster; where none is left, by its folder, if --root says where that is.

    Raises ConfigError with the names that are there.
    """
    from argusrl.cluster.overview import RunOverview, find_overview

    try:
        return find_overview(kube, run)
    except ConfigError:
        if run is None or root is None or not (root / run).is_dir():
            raise
        return RunOverview(run=run, namespace=kube.namespace, folder=str(root / run))


def read_record(kube: KubeApi, found: RunOverview, root: Path | None, *, ask: bool = True) -> tuple[Any, str]:
    """What `argusrl runs show --json` says of the run, and where from; None and why where nobody can say."""
    from argusrl.cli.cluster.options import seen_folder
    from argusrl.cli.runs import summarise

    if not found.folder:
        return None, "no object of the run names its folder"
    here = seen_folder(found.folder, root)
    if here is not None:
        try:
            return summarise(here), str(here.path)
        except ArgusError as error:
            return None, error.message
    if found.head is None or not ask:
        return None, f"{found.folder} is not seen from here (--root says where it is), and no head pod runs to ask"
    folder = Path(found.folder)
    command = ["argusrl", "runs", "show", folder.name, "--root", str(folder.parent), "--json"]
    try:
        code, output = kube.execute(
            found.head.name, command, found.namespace, container=found.head.container, seconds=_ASK_SECONDS
        )
    except ArgusError as error:
        return None, error.message
    start = output.find("{")
    try:
        return json.loads(output[start:]), f"pod {found.head.name}"
    except ValueError:
        last = (output.strip().splitlines() or [f"exit code {code}"])[-1]
        return None, f"pod {found.head.name} says: {last}"
