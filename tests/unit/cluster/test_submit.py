from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.cluster.kinds import RAY_JOB, SERVICE_ACCOUNT
from argusrl.cluster.kube_api import Conflict, KubeError
from argusrl.cluster.manifests.render import render
from argusrl.cluster.names import submission_name
from argusrl.cluster.numbering import remember_number
from argusrl.cluster.ray_jobs import RayJobs
from argusrl.cluster.submit import job_of_recipe, jobs_of_run, next_number, submit_documents
from argusrl.config.load import load_config, write_resolved
from argusrl.errors import ClusterError, ConfigError
from argusrl.recovery.resume import choose_run, create_run
from argusrl.storage.layout import RunFolder
from fakes.kubernetes_api import MemoryKube, Store
from fakes.kubernetes_recipe import kubernetes_config
from fakes.ray_dashboard import RayDashboard


def test_two_people_who_submit_at_the_same_moment_make_one_submission() -> None:
    store = Store(schemas=None)
    config = kubernetes_config("run.name=maze")
    first, second = MemoryKube(store), MemoryKube(store)
    number = next_number(first, "maze", "default")
    assert next_number(second, "maze", "default") == number == 1
    submit_documents(first, render(config, number), "maze", number)
    with pytest.raises(ClusterError, match="created by somebody else at this moment"):
        submit_documents(second, render(config, number), "maze", number)
    assert [job["metadata"]["name"] for job in store.objects(RAY_JOB)] == [submission_name("maze", 1)]


@pytest.mark.parametrize(
    ("run", "mine"),
    [("maze", {"maze-s3"}), ("maze-s1", {"maze-s1-s1"}), ("maze-small", {"maze-small-s3"}), ("m", set())],
)
def test_a_run_takes_no_other_runs_jobs_for_its_own(run: str, mine: set[str]) -> None:
    with RayDashboard() as dashboard:
        for name in ("maze-s3", "maze-small-s3", "maze-s1-s1", "maze-sx", "maze-s", "maze-s0", "x-maze-s3"):
            dashboard.set(name, "RUNNING")
        assert {job.submission_id for job in jobs_of_run(RayJobs(dashboard.url), run)} == mine


def test_a_number_that_anybody_remembers_is_not_given_twice() -> None:
    kube = MemoryKube(Store(schemas=None))
    remember_number(kube, "maze", "default", 4)  # a run without an account has none to write on
    assert next_number(kube, "maze", "default") == 1
    submit_documents(kube, render(kubernetes_config("run.name=maze"), 1), "maze", 1)
    kube.store.delete(RAY_JOB, "maze-s1", "default")
    remember_number(kube, "maze", "default", 3)
    remember_number(kube, "maze", "default", 2)
    assert next_number(kube, "maze", "default") == 4
    assert next_number(kube, "maze", "default", recorded=7) == 8


def test_whoever_may_not_write_a_number_down_is_not_kept_from_anything() -> None:
    def refuse(verb: str, kind: object, name: str) -> None:
        if kind is SERVICE_ACCOUNT:
            raise KubeError("forbidden")

    remember_number(MemoryKube(Store(schemas=None), before=refuse), "maze", "default", 3)


def test_a_conflict_that_is_no_other_submission_is_passed_on() -> None:
    def refuse(verb: str, kind: object, name: str) -> None:
        if kind is RAY_JOB and verb == "create":
            raise Conflict("the namespace is being deleted")

    with pytest.raises(KubeError, match="being deleted"):
        submit_documents(
            MemoryKube(Store(schemas=None), before=refuse), render(kubernetes_config("run.name=maze")), "maze", 1
        )


def test_users_own_code_travels_with_a_job(tmp_path: Path) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def length(*_): return 0.0\n")
    root = Path("/fsx/argusrl/runs")
    config = kubernetes_config("run.name=maze", f"rewards.0.function={code}:length", "rewards.0.kind=python")
    entrypoint, runtime_env = job_of_recipe(config)
    assert "packed_recipe" in entrypoint
    assert runtime_env["env_vars"]["ARGUSRL_RUN_FOLDER"] == str(root / "maze")


def test_a_job_needs_a_place_that_pods_see() -> None:
    config = kubernetes_config("run.name=maze")
    relative = config.model_copy(update={"run": config.run.model_copy(update={"root": Path("runs")})})
    with pytest.raises(ConfigError, match="absolute path of the shared file system"):
        job_of_recipe(relative)


def test_the_config_of_a_run_folder_is_a_recipe_that_resumes_it(tmp_path: Path) -> None:
    """Whoever submits a run again needs nothing but its folder."""
    config = kubernetes_config("run.name=maze", "cluster.kubernetes=null", f"run.root={tmp_path}")
    choice = choose_run(config)
    create_run(choice)
    folder = RunFolder(tmp_path / "maze")
    assert choice.folder == folder
    again = load_config(folder.config).config
    assert again == choice.config
    folder.commit(0).parent.mkdir()
    folder.commit(0).write_bytes(b"{}")
    resumed = choose_run(again)
    assert (resumed.action, resumed.folder) == ("resume", folder)
    write_resolved(resumed.config, folder.config)
    assert load_config(folder.config).config == again
