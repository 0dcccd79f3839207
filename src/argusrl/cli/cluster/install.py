"""argusrl cluster install: the administrator's part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import ContextOption, open_kube, write_objects

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.cluster.manifests.install import Installation
    from argusrl.config.sections import Config


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("install")
    def install(
        recipe: Annotated[
            Path, typer.Argument(help="A recipe with cluster.kubernetes: image, file system, namespace of runs.")
        ],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        namespace: Annotated[str, typer.Option("--namespace", help="Namespace of the controller.")] = "argusrl-system",
        run_namespace: Annotated[
            list[str] | None,
            typer.Option("--run-namespace", help="Namespace with runs (repeatable); default is the recipe's."),
        ] = None,
        claim: Annotated[
            str | None, typer.Option("--claim", help="Claim of the file system in the controller's namespace.")
        ] = None,
        image: Annotated[str, typer.Option("--image", help="Image of the controller; the CPU image will do.")] = "",
        replicas: Annotated[int, typer.Option("--replicas", min=1, max=2, help="Controllers.")] = 1,
        node_label: Annotated[
            list[str] | None,
            typer.Option(
                "--node-label",
                metavar="KEY=VALUE",
                help="Nodes for the controller (repeatable); default: those of the recipe's head.",
            ),
        ] = None,
        role_arn: Annotated[str | None, typer.Option("--role-arn", help="IAM role of the controller (IRSA).")] = None,
        group: Annotated[str | None, typer.Option("--group", help="Group of users who may run things there.")] = None,
        secret: Annotated[
            list[str] | None,
            typer.Option("--secret", metavar="NAME=SECRET/KEY", help="Variable of the controller, e.g. a webhook."),
        ] = None,
        prepull: Annotated[
            bool, typer.Option("--prepull", help="Keep the image on all nodes of workers and heads.")
        ] = False,
        output: Annotated[str, typer.Option("--output", help="File for the YAML, or - for standard output.")] = "-",
        context: ContextOption = None,
        apply: Annotated[
            bool, typer.Option("--apply", help="Check the cluster, then create the objects in it.")
        ] = False,
    ) -> None:
        """Install the controller, its rights and those of users: once for a cluster, by an administrator."""
        from argusrl.cluster.manifests.check import problems_of
        from argusrl.cluster.manifests.install import install as objects
        from argusrl.cluster.manifests.install import installation_of
        from argusrl.config.load import load_config
        from argusrl.errors import ConfigError

        changes = [*(overrides or []), *([f"cluster.kubernetes.volume.claim={claim}"] if claim else [])]
        config = load_config(recipe, changes).config
        wanted = installation_of(
            config,
            namespace=namespace,
            run_namespaces=run_namespace or [],
            image=image,
            replicas=replicas,
            node_labels=_labels(node_label or []),
            role_arn=role_arn,
            group=group,
            secrets=_secrets(secret or []),
            prepull=prepull,
        )
        documents = objects(wanted)
        if problems := [problem for document in documents for problem in problems_of(document.value)]:
            raise ConfigError(problems)
        for line in _disagreements(config, wanted):
            typer.secho(line, fg="yellow", err=True)
        if apply:
            kube = open_kube(context, None)
            _apply([document.value for document in documents], kube)
            _say_missing_claims(wanted, kube)
        else:
            write_objects(documents, output)


def _disagreements(config: Config, wanted: Installation) -> list[str]:
    """Where the options make another controller than runs of the recipe count on."""
    found = []
    expected = wanted.kubernetes.controller_namespace
    if expected != wanted.namespace:
        found.append(
            f"--namespace {wanted.namespace}: the recipe's cluster.kubernetes.controller_namespace is {expected}, and "
            "its runs let the controller in from there alone; make them the same"
        )
    kind, _, variable = (config.cluster.notify.webhook or "").partition(":")
    if kind == "env" and variable not in wanted.secrets:
        found.append(
            f"cluster.notify.webhook {kind}:{variable}: the controller has no such variable; add "
            f"--secret {variable}=SECRET/KEY"
        )
    return found


def _secrets(texts: list[str]) -> dict[str, str]:
    import re

    from argusrl.errors import ConfigError

    wrong = [text for text in texts if not re.fullmatch(r"[A-Za-z_]\w*=[-.a-z0-9]+/[-._A-Za-z0-9]+", text)]
    if wrong:
        raise ConfigError([f"--secret {text.partition('=')[0]}: write NAME=SECRET/KEY" for text in wrong])
    return dict(text.split("=", 1) for text in texts)


def _labels(texts: list[str]) -> dict[str, str]:
    from argusrl.errors import ConfigError

    if wrong := [text for text in texts if "=" not in text.strip("=")]:
        raise ConfigError([f"--node-label {text}: write KEY=VALUE" for text in wrong])
    return dict(text.split("=", 1) for text in texts)


def _apply(documents: list[dict[str, object]], kube: Kube) -> None:
    from argusrl.cli.output import say
    from argusrl.cluster.manifests.apply import apply_all, cluster_problems
    from argusrl.errors import ClusterError

    if problems := cluster_problems(kube):
        lines = [f"{one.name}: {one.detail}; {one.fix}" for one in problems]
        raise ClusterError("\n".join(lines), "nothing was changed")
    for line in apply_all(documents, kube):
        say(line)


def _say_missing_claims(wanted: Installation, kube: Kube) -> None:
    """A claim of the administrator's own is in one namespace, and the controller's pod needs it in another."""
    from argusrl.cluster.manifests.apply import places_without_claim

    claim = wanted.kubernetes.volume.claim
    for namespace in places_without_claim(kube, claim, [wanted.namespace, *wanted.namespaces]):
        typer.secho(
            f"namespace {namespace} has no PersistentVolumeClaim {claim}: pods there wait for it. Make one of that "
            "name, on the same file system",
            fg="yellow",
            err=True,
        )
