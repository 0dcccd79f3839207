"""argusrl cluster doctor: what of a cluster works for runs, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import ContextOption, NamespaceOption, open_kube
from argusrl.cli.output import JsonOption, say, say_json

if TYPE_CHECKING:
    from argusrl.cluster.doctor.finding import Finding, Subject
    from argusrl.cluster.kube_api import KubeApi
    from argusrl.config.sections import Config

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red"), "skipped": ("–", "bright_black")}


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("doctor")
    def doctor(
        recipe: Annotated[Path | None, typer.Argument(help="Recipe whose needs to check, too.")] = None,
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        run: Annotated[
            str | None, typer.Option("--run", help="Run whose pods try the storage; default is any that runs.")
        ] = None,
        probe: Annotated[
            bool, typer.Option("--probe", help="Without a run: start two small pods that try the storage.")
        ] = False,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Check the cluster: rights, KubeRay, storage, nodes, clocks. Exit code 1 if something it needs is missing."""
        from argusrl.cluster.doctor.finding import Subject, is_fit
        from argusrl.config.load import load_config
        from argusrl.errors import ArgusError

        config = load_config(recipe, overrides or []).config if recipe is not None else None
        section = config.cluster.kubernetes if config is not None else None
        kube = open_kube(context, namespace or (section.namespace if section is not None else None))
        findings = examine(Subject(kube, config), say_each=not as_json)
        findings += _storage(kube, config, run, probe=probe, say_each=not as_json)
        fit = is_fit(findings)
        if as_json:
            say_json({"namespace": kube.namespace, "fit": fit, "checks": [asdict(one) for one in findings]})
        if not fit:
            raise typer.Exit(ArgusError.exit_code)


def examine(subject: Subject, *, say_each: bool) -> list[Finding]:
    """All checks that need nothing but the API server."""
    from argusrl.cluster.doctor import access, kuberay, nodes, storage
    from argusrl.cluster.doctor.finding import guarded

    checks = (
        ("api server", access.check_server),
        ("namespace", access.check_namespace),
        ("clock", access.check_clocks),
        ("rights", access.check_rights),
        ("crds", kuberay.check_crds),
        ("kuberay operator", kuberay.check_operator),
        ("argusrl controller", kuberay.check_controller),
        ("queue", kuberay.check_queue),
        ("nodes", nodes.check_nodes),
        ("claim", storage.check_claim),
    )
    findings: list[Finding] = []
    for name, check in checks:
        found = guarded(name, check, subject)
        findings += found
        if say_each:
            _say(found)
        if name == "api server" and any(one.result == "failed" for one in found):
            break  # nothing else will be answered, and each would wait in vain
    return findings


def _storage(kube: KubeApi, config: Config | None, run: str | None, *, probe: bool, say_each: bool) -> list[Finding]:
    """What pods can do on the file system: those of a run, or some made for it."""
    from argusrl.cluster.doctor.finding import Finding
    from argusrl.cluster.doctor.probing import probe_run, probe_with_pods
    from argusrl.cluster.kube_api import KubeError
    from argusrl.cluster.overview import overviews

    name = run or (str(config.run.name) if config is not None else None)
    try:
        known = overviews(kube, name)
        others = overviews(kube, None) if run is not None and not known else []
    except KubeError as error:
        found = [Finding("storage", "skipped", error.message)]
    else:
        running = [one for one in known if one.head is not None and one.folder]
        if run is not None and not known:
            there = ", ".join(one.run for one in others) or "none"
            found = [Finding("storage", "failed", f"no run {run} in {kube.namespace}", f"runs there: {there}")]
        elif running:
            found = probe_run(kube, running[0])
        elif probe and config is not None:
            from argusrl.cluster.reader_pod import probe_pods

            found = probe_with_pods(kube, probe_pods(config, kube.namespace))
        else:
            fix = "argusrl cluster doctor RECIPE --probe starts two small pods that try it"
            found = [Finding("storage", "skipped", "no run with pods that could try it", fix)]
    if say_each:
        _say(found)
    return found


def _say(findings: list[Finding]) -> None:
    for one in findings:
        mark, colour = _MARKS[one.result]
        say(f"{mark} {one.name:<20} {one.detail}", colour)
        if one.fix and one.result != "ok":
            say(f"    → {one.fix}", "cyan")
