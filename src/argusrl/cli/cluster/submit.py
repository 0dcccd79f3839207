"""argusrl cluster submit: give a run to the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import AddressOption, ClusterOption, ContextOption, NamespaceOption, RunsOption

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.cluster.ray_jobs import RayJobs
    from argusrl.cluster.submit import Submitted
    from argusrl.config.sections import Config


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("submit")
    def submit(
        recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) with a section cluster.kubernetes.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        address: AddressOption = None,
        cluster: ClusterOption = None,
        watch: Annotated[
            bool, typer.Option("--watch", help="Stay and say what happens; the exit code says how it ended.")
        ] = False,
        root: RunsOption = None,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
    ) -> None:
        """Give a run to the cluster, or let an unfinished one go on there.

        Creates what `argusrl cluster manifest` shows, under the next number of the run. With --address or --cluster
        the run becomes a job of a Ray cluster that is there, and the recipe travels with it.
        """
        raise typer.Exit(run(recipe, overrides or [], address, cluster, watch, root, namespace, context))


def run(
    recipe: Path,
    overrides: list[str],
    address: str | None,
    cluster: str | None,
    watch: bool,
    root: Path | None,
    namespace: str | None,
    context: str | None,
) -> int:
    """Submit, and follow if asked; the exit code."""
    from argusrl.cli.cluster.options import open_kube
    from argusrl.cli.cluster.reach import open_cluster_jobs, open_jobs, require_one
    from argusrl.cluster.submit import submit_job, submit_to_cluster
    from argusrl.config.load import load_config

    require_one(address, cluster)
    config = load_config(recipe, overrides).config
    if address is not None:
        with open_jobs(address) as jobs:
            made = submit_job(jobs, config, _recorded(None, config, root))
            return _said_job(made, jobs, f"--address {address}", watch=watch)
    section = config.cluster.kubernetes
    kube = open_kube(context, namespace or (section.namespace if section is not None else None))
    if cluster is not None:
        with open_cluster_jobs(kube, cluster) as jobs:
            recorded = _recorded(kube, config, root)
            made = submit_to_cluster(kube, jobs, cluster, kube.namespace, config, recorded)
            return _said_job(made, jobs, f"--cluster {cluster}", watch=watch)
    return _submit_ray_job(kube, config, _recorded(None, config, root), watch=watch)


def _recorded(kube: Kube | None, config: Config, root: Path | None) -> int:
    """The highest submission that the run folder knows: read here, else by the run's head pod; 0 if nobody sees it."""
    from argusrl.cli.cluster.options import seen_folder
    from argusrl.cli.cluster.record import read_record
    from argusrl.cluster.kube_api import KubeError
    from argusrl.cluster.overview import overviews
    from argusrl.journal.submissions import newest_submission

    name = str(config.run.name)
    folder = seen_folder(str(config.run.root / name), root)
    if folder is not None:
        return newest_submission(folder)
    record = None
    if kube is not None:
        try:
            found = overviews(kube, name)
        except KubeError:  # who may not list pods may submit all the same
            found = []
        record = read_record(kube, found[0], root)[0] if found else None
    return max((one["number"] for one in (record or {}).get("submissions", [])), default=0)


def _submit_ray_job(kube: Kube, config: Config, recorded: int, *, watch: bool) -> int:
    from argusrl.cli.cluster.watching import watch_run
    from argusrl.cli.output import say
    from argusrl.cluster.manifests.check import problems_of
    from argusrl.cluster.manifests.render import render
    from argusrl.cluster.plan.prediction import require_fit
    from argusrl.cluster.submit import next_number, submit_documents
    from argusrl.errors import ConfigError

    name, section = str(config.run.name), config.cluster.kubernetes
    if section is None:
        raise ConfigError(
            "the recipe has no section cluster.kubernetes", "argusrl config explain cluster.kubernetes lists its keys"
        )
    if section.namespace != kube.namespace:  # --namespace
        section = section.model_copy(update={"namespace": kube.namespace})
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"kubernetes": section})})
    number = next_number(kube, name, kube.namespace, recorded)
    documents = render(config, number)
    if problems := [problem for document in documents for problem in problems_of(document.value)]:
        raise ConfigError(problems, "argusrl cluster manifest RECIPE --validate shows the objects")
    for warning in require_fit(config):
        typer.secho(warning, fg="yellow", err=True)
    _require_there(kube, config)
    made = submit_documents(kube, documents, name, number)
    say(f"submitted {made.where} (submission {made.number} of run {name})", "green")
    if watch:
        return watch_run(kube, name)
    say(f"argusrl cluster status {name} -n {kube.namespace} shows how it goes")
    return 0


def _require_there(kube: Kube, config: Config) -> None:
    """Raises ClusterError where a namespace, queue or claim that nobody creates is not there."""
    from argusrl.cluster.doctor.access import check_namespace
    from argusrl.cluster.doctor.finding import Subject, guarded
    from argusrl.cluster.doctor.kuberay import check_queue
    from argusrl.cluster.doctor.storage import check_presence
    from argusrl.errors import ClusterError

    subject = Subject(kube, config)
    found = guarded("namespace", check_namespace, subject)
    if not found:
        found = [*guarded("queue", check_queue, subject), *guarded("claim", check_presence, subject)]
    if missing := [one for one in found if one.result == "failed"]:
        raise ClusterError("\n".join(one.detail for one in missing), "; ".join(one.fix for one in missing))


def _said_job(made: Submitted, jobs: RayJobs, way: str, *, watch: bool) -> int:
    from argusrl.cli.cluster.watching import watch_job
    from argusrl.cli.output import say

    say(f"submitted job {made.name} to {made.where}", "green")
    if watch:
        return watch_job(jobs, made.name)
    say(f"argusrl cluster logs {made.run} {way} --follow shows what it writes")
    return 0
