"""Options that the sub-verbs share, and how they reach the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argusrl.cluster.kube import Kube
    from argusrl.cluster.manifests.document import Document
    from argusrl.storage.layout import RunFolder

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; default is the one of your kubeconfig's context.")
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", help="A Ray cluster's dashboard instead: http://HOST:8265, or sagemaker_ray://CLUSTER/NAMESPACE."
    ),
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="An existing RayCluster instead, e.g. one made in Studio.")
]
RunsOption = Annotated[
    Path | None,
    typer.Option("--root", help="Where run folders are seen from here, if not where pods see them."),
]
RunName = Annotated[str | None, typer.Argument(help="Name of the run; not needed where there is only one.")]


def open_kube(context: str | None, namespace: str | None) -> Kube:
    """The cluster of the kubeconfig, or the one around this pod. Raises ClusterError."""
    from argusrl.cluster.kube import connect

    return connect(context, namespace)


def write_objects(documents: Sequence[Document], output: str) -> None:
    """As YAML, to a file or for - to standard output. Raises ConfigError where the file cannot be written."""
    from argusrl.cluster.manifests.document import to_yaml
    from argusrl.errors import ConfigError

    if output == "-":
        typer.echo(to_yaml(documents), nl=False)
        return
    try:
        Path(output).write_text(to_yaml(documents), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from error
    typer.echo(f"{output}: {len(documents)} objects; kubectl apply -f {output}")


def seen_folder(folder: str, root: Path | None) -> RunFolder | None:
    """A run folder that pods see at `folder`, as seen from here; None where it is not."""
    from argusrl.storage.layout import RunFolder

    if not folder:
        return None
    here = RunFolder(root / Path(folder).name if root is not None else Path(folder))
    return here if here.path.is_dir() else None
