from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.cluster.kinds import CLAIM, CONFIG_MAP, NETWORK_POLICY, RAY_CLUSTER, RAY_JOB, SERVICE_ACCOUNT, VOLUME
from argusrl.cluster.manifests.install import install, installation_of
from argusrl.cluster.packed_recipe import VARIABLE, unpack
from argusrl.config.load import load_config
from argusrl.journal.submissions import Submission, record_submission
from argusrl.storage.layout import RunFolder
from fakes.kubernetes_api import ApiServer, Rule
from fakes.kubernetes_recipe import RECIPE
from fakes.ray_cluster_objects import start
from fakes.ray_dashboard import RayDashboard

SUBMIT = ["cluster", "submit", str(RECIPE), "run.name=maze"]


@pytest.fixture
def dashboard() -> Iterator[RayDashboard]:
    with RayDashboard() as dashboard:
        yield dashboard


def finish(server: ApiServer, name: str, status: str = "Failed") -> None:
    server.store.patch(RAY_JOB, name, {"status": {"jobDeploymentStatus": status}}, "default", sub="status")


def seed_studio(server: ApiServer, dashboard: RayDashboard, **notes: dict[str, str]) -> None:
    """A RayCluster that somebody made in Studio; the port of its dashboard leads to `dashboard`."""
    head = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "x"}]}}}
    cluster = {"kind": "RayCluster", "metadata": {"name": "studio", **notes}, "spec": {"headGroupSpec": head}}
    server.store.seed({**cluster, "status": {"head": {"podName": "studio-head"}}})
    server.store.seed({"kind": "Pod", "metadata": {"name": "studio-head"}, "spec": {"containers": []}})
    server.ports["studio-head", 8265] = dashboard.port


def record(folder: RunFolder, number: int) -> Submission:
    """A submission that the controller has decided on."""
    values = {"namespace": "default", "kind": "rayjob", "reason": "head_gone", "text": "", "time": 1.0, "manifest": {}}
    return record_submission(folder, Submission(number=number, name=f"maze-s{number}", **values))


def numbers(server: ApiServer) -> list[str]:
    return [job["metadata"]["name"] for job in server.store.objects(RAY_JOB)]


def test_everything_that_a_run_needs_is_created(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SUBMIT) == 0
    assert "submitted default/maze-s1 (submission 1 of run maze)" in capsys.readouterr().out
    (job,) = server.store.objects(RAY_JOB)
    assert job["metadata"]["labels"]["argusrl.io/run"] == "maze"
    for kind in (SERVICE_ACCOUNT, NETWORK_POLICY, CONFIG_MAP, CLAIM, VOLUME):
        assert len(server.store.objects(kind)) == 1, kind
    assert ("create", "rayjobs", "") in server.asked
    assert server.asked[-1] == ("create", "rayjobs", "")  # the last of all, when everything it needs is there


def test_a_run_in_the_cluster_is_not_submitted_again(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    run(SUBMIT)
    assert run(SUBMIT) == 7
    assert "run maze is in the cluster already: RayJob maze-s1" in capsys.readouterr().err
    assert numbers(server) == ["maze-s1"]


def test_the_next_submission_has_the_next_number_even_where_old_objects_are_gone(server: ApiServer) -> None:
    run(SUBMIT)
    finish(server, "maze-s1")
    run(SUBMIT)
    assert numbers(server) == ["maze-s1", "maze-s2"]
    for name in numbers(server):
        server.store.delete(RAY_JOB, name, "default")
    run(SUBMIT)
    assert numbers(server) == ["maze-s3"]


def test_a_job_that_is_being_deleted_is_waited_for(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    run(SUBMIT)
    server.store.patch(RAY_JOB, "maze-s1", {"metadata": {"finalizers": ["x/y"]}}, "default")
    server.store.delete(RAY_JOB, "maze-s1", "default")
    assert run(SUBMIT) == 7
    assert "is being deleted" in capsys.readouterr().err


def test_storage_that_is_there_stays_as_it_is(server: ApiServer) -> None:
    run(SUBMIT)
    before = [server.store.objects(kind)[0]["metadata"]["resourceVersion"] for kind in (CLAIM, VOLUME)]
    finish(server, "maze-s1")
    run([*SUBMIT, "cluster.kubernetes.volume.capacity=9600Gi"])
    assert [server.store.objects(kind)[0]["metadata"]["resourceVersion"] for kind in (CLAIM, VOLUME)] == before


def test_cluster_scoped_objects_may_be_an_administrators(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.rules.append(Rule(verb="create|patch", resource="persistentvolumes", status=403))
    assert run(SUBMIT) == 7
    assert "argusrl cluster install RECIPE --run-namespace default --apply" in capsys.readouterr().err
    assert numbers(server) == []
    server.rules[:] = [Rule(resource="persistentvolumes", status=403)]
    assert run(SUBMIT) == 0


def test_a_user_with_namespaced_rights_submits_to_a_cluster_that_was_installed(server: ApiServer) -> None:
    """Commands 8 and 10 of docs/hyperpod.md, the second one by somebody who may not create volumes."""
    for document in install(installation_of(load_config(RECIPE, []).config)):
        server.connect().apply(document.value)
    server.rules.append(Rule(verb="create|patch", resource="persistentvolumes", status=403))
    assert run(SUBMIT) == 0
    claims = {claim["metadata"]["namespace"]: claim["spec"]["volumeName"] for claim in server.store.objects(CLAIM)}
    assert claims["default"] == "default-argusrl-shared"


def test_the_number_is_above_what_the_run_folder_knows(server: ApiServer, tmp_path: Path) -> None:
    """The controller has submitted the run again, and its RayJob is gone."""
    record(RunFolder(tmp_path / "maze"), 3)
    assert run([*SUBMIT, "--root", str(tmp_path)]) == 0
    assert numbers(server) == ["maze-s4"]


def test_the_number_of_a_job_is_above_what_the_head_knows(server: ApiServer, dashboard: RayDashboard) -> None:
    seed_studio(server, dashboard)
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    dashboard.jobs.clear()  # a new head; the controller submitted to the one before
    labels = {"ray.io/cluster": "studio", "ray.io/node-type": "head"}
    head = {"containers": [{"name": "ray", "image": "x"}]}
    status = {"phase": "Running"}
    server.store.seed(
        {"kind": "Pod", "metadata": {"name": "studio-head", "labels": labels}, "spec": head, "status": status}
    )
    server.programs["studio-head"] = lambda command: (0, json.dumps({"submissions": [{"number": 1}, {"number": 5}]}))
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    assert set(dashboard.jobs) == {"maze-s6"}
    dashboard.set("maze-s6", "FAILED")
    server.rules.append(Rule(verb="list", resource="pods", status=403))
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    assert set(dashboard.jobs) == {"maze-s6", "maze-s7"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cluster.kubernetes.head.memory=1Gi", "does not fit: "),
        ("cluster.kubernetes.volume={claim: mine}", "namespace default has no PersistentVolumeClaim mine"),
        ("cluster.kubernetes.queue={name: team}", "namespace default has no LocalQueue team"),
        ("cluster.kubernetes.namespace=other", "there is no namespace other\n  → there are: default"),
    ],
)
def test_what_would_fail_or_wait_for_ever_is_not_submitted(
    change: str, words: str, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, change]) in (2, 7)
    assert words in capsys.readouterr().err
    assert numbers(server) == []


def test_another_namespace(server: ApiServer) -> None:
    server.store.seed({"kind": "Namespace", "metadata": {"name": "team"}})
    assert run([*SUBMIT, "-n", "team"]) == 0
    (job,) = server.store.objects(RAY_JOB)
    assert job["metadata"]["namespace"] == "team"


def test_a_right_that_is_missing_is_named(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.rules.append(Rule(verb="create", resource="rayjobs", status=403))
    assert run(SUBMIT) == 7
    assert 'cannot create resource "rayjobs"' in capsys.readouterr().err


def test_a_job_of_a_ray_cluster_brings_its_recipe(
    dashboard: RayDashboard, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, "--address", dashboard.url]) == 0
    job = dashboard.jobs["maze-s1"]
    assert job["entrypoint"] == "python -m argusrl.cluster.packed_recipe"
    assert job["runtime_env"]["env_vars"]["ARGUSRL_RUN_FOLDER"].endswith("/maze")
    assert job["runtime_env"]["env_vars"]["ARGUSRL_SUBMISSION"] == "1"
    assert VARIABLE in job["runtime_env"]["env_vars"]
    assert run([*SUBMIT, "--address", dashboard.url]) == 7
    assert "job maze-s1 is PENDING" in capsys.readouterr().err
    dashboard.set("maze-s1", "FAILED")
    assert run([*SUBMIT, "--address", dashboard.url]) == 0
    assert set(dashboard.jobs) == {"maze-s1", "maze-s2"}


def test_the_recipe_that_a_job_unpacks_is_the_one_that_was_submitted(
    dashboard: RayDashboard, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("fsx")
    overrides = ["run.name=maze", f"run.root={root}", "algorithm.num_steps=7"]
    mount = f"cluster.kubernetes.volume.mount={root}"
    paths = [f"model.path={root}/model", f"data.train={root}/train.parquet", f"data.heldout={root}/heldout.parquet"]
    assert run(["cluster", "submit", str(RECIPE), *overrides, mount, *paths, "--address", dashboard.url]) == 0
    recipe = unpack(dashboard.jobs["maze-s1"]["runtime_env"]["env_vars"][VARIABLE])
    config = load_config(recipe).config
    assert config.run.name == "maze"
    assert config.algorithm.num_steps == 7
    assert config.cluster.address == "auto"


def test_somebodys_ray_cluster_learns_what_the_controller_needs(server: ApiServer, dashboard: RayDashboard) -> None:
    seed_studio(server, dashboard)
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    found = server.store.get(RAY_CLUSTER, "studio", "default")["metadata"]
    assert found["labels"]["argusrl.io/run"] == "maze"
    assert found["annotations"]["argusrl.io/run-folder"].endswith("/maze")
    assert json.loads(found["annotations"]["argusrl.io/job"])["entrypoint"] == dashboard.jobs["maze-s1"]["entrypoint"]
    dashboard.jobs.clear()  # a new head
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    assert set(dashboard.jobs) == {"maze-s2"}
    assert run(["cluster", "stop", "maze", "--cluster", "studio"]) == 0
    assert dashboard.jobs["maze-s2"]["status"] == "STOPPED"
    assert run(["cluster", "stop", "maze", "--cluster", "studio"]) == 2
    assert run([*SUBMIT, "--cluster", "studio"]) == 0
    dashboard.jobs.clear()  # a new head: the controller is about to submit the run there again
    assert run(["cluster", "stop", "maze", "--cluster", "studio"]) == 0
    assert "argusrl.io/job" not in server.store.get(RAY_CLUSTER, "studio", "default")["metadata"]["annotations"]


def test_a_ray_cluster_that_cannot_be_annotated_is_told(
    server: ApiServer, dashboard: RayDashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_studio(server, dashboard)
    server.rules.append(Rule(verb="patch", resource="rayclusters", status=403))
    assert run([*SUBMIT, "--cluster", "studio"]) == 7
    assert "job maze-s1 runs, but the controller will not submit it again" in capsys.readouterr().err
    assert "maze-s1" in dashboard.jobs


def test_a_ray_cluster_of_another_run_is_left_alone(
    server: ApiServer, dashboard: RayDashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_studio(server, dashboard, labels={"argusrl.io/run": "other"}, annotations={"argusrl.io/job": "{}"})
    assert run([*SUBMIT, "--cluster", "studio"]) == 7
    assert "is run other's" in capsys.readouterr().err
    assert not dashboard.jobs


def test_watching_follows_the_job_to_its_end(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from argusrl.cli.cluster import watching

    steps = iter(
        [
            lambda job: start(server.store, job, ["n1", "n2"]),
            lambda job: finish(server, "maze-s1", "Complete"),
        ]
    )
    monkeypatch.setattr(watching.time, "sleep", lambda _: next(steps)(server.store.get(RAY_JOB, "maze-s1", "default")))
    assert run([*SUBMIT, "--watch"]) == 0
    text = capsys.readouterr().out
    for words in ("maze-s1: starting; 0 of 0 pods run", "maze-s1: running; 2 of 2 pods run", "maze-s1: complete"):
        assert words in text


def test_watching_outlives_a_server_that_is_away(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from argusrl.cli.cluster import watching

    monkeypatch.setattr("argusrl.cluster.kube_http._READ_TRIES", 1)
    monkeypatch.setattr("argusrl.cluster.kube_http.time.sleep", lambda _: None)

    def away(_: float) -> None:
        server.rules[:] = [Rule(status=503)]
        monkeypatch.setattr(watching.time, "sleep", back)

    def back(_: float) -> None:
        server.rules.clear()
        monkeypatch.setattr(watching.time, "sleep", lambda _: finish(server, "maze-s1", "Complete"))

    monkeypatch.setattr(watching.time, "sleep", away)
    assert run([*SUBMIT, "--watch"]) == 0
    text = capsys.readouterr().out
    assert "the API server failed" in text
    assert "maze-s1: complete" in text


def test_watching_ends_when_nothing_follows_a_failure(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from argusrl.cli.cluster.watching import watch_run

    run(SUBMIT)
    finish(server, "maze-s1", "Failed")
    assert watch_run(server.connect(), "maze", look_seconds=0.0, patience_seconds=0.0) == 7
    assert "maze-s1: failed" in capsys.readouterr().out


def test_what_is_there_is_named(server: ApiServer, dashboard: RayDashboard, capsys: pytest.CaptureFixture[str]) -> None:
    seed_studio(server, dashboard)
    assert run([*SUBMIT, "--cluster", "foo"]) == 7
    assert "namespace default has no RayCluster foo\n  → there are: studio;" in capsys.readouterr().err
    assert run([*SUBMIT, "--context", "nope"]) == 7
    assert "the kubeconfig has no context nope\n  → there are: " in capsys.readouterr().err


def test_both_ways_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SUBMIT, "--address", "http://x:8265", "--cluster", "y"]) == 2
    assert "in two ways" in capsys.readouterr().err
