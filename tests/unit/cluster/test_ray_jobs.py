from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from argusrl.cluster.ray_jobs import RayJobs, head_address
from argusrl.errors import ClusterError, ConfigError
from fakes.ray_dashboard import RayDashboard


@pytest.fixture
def dashboard() -> Iterator[RayDashboard]:
    with RayDashboard() as dashboard:
        yield dashboard


def test_a_job_is_submitted_once(dashboard: RayDashboard) -> None:
    jobs = RayJobs(dashboard.url)
    assert jobs.submit("maze-s1", "argusrl train x", {"env_vars": {"A": "1"}}, {"run": "maze"})
    assert not jobs.submit("maze-s1", "something else")
    assert dashboard.jobs["maze-s1"]["entrypoint"] == "argusrl train x"
    assert dashboard.jobs["maze-s1"]["runtime_env"] == {"env_vars": {"A": "1"}}
    assert jobs.status("maze-s1") == "PENDING"
    assert jobs.status("maze-s2") is None


def test_a_job_that_another_one_submitted_between_look_and_leap_counts_as_there(
    dashboard: RayDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = RayJobs(dashboard.url)
    looks = iter([lambda _: None])
    monkeypatch.setattr(jobs, "get", lambda name, real=jobs.get: next(looks, real)(name))
    dashboard.set("maze-s1", "RUNNING")
    assert not jobs.submit("maze-s1", "argusrl train x")


def test_jobs_are_listed_newest_first_without_drivers_that_came_another_way(dashboard: RayDashboard) -> None:
    dashboard.set("a", "FAILED", start_time=1000, message="out of memory", error_type="X")
    dashboard.set("b", "RUNNING", start_time=2000)
    first, second = RayJobs(dashboard.url).list()
    assert (first.submission_id, first.ended, first.started) == ("b", False, 2.0)
    assert (second.status, second.message, second.ended) == ("FAILED", "out of memory", True)


def test_stopping_and_logs(dashboard: RayDashboard) -> None:
    jobs = RayJobs(dashboard.url)
    dashboard.set("a", "RUNNING")
    dashboard.logs["a"] = "one\ntwo\n"
    assert jobs.logs("a") == "one\ntwo\n"
    assert jobs.stop("a")
    assert not jobs.stop("a")
    assert not jobs.stop("nobody")
    with pytest.raises(ClusterError, match="does not exist"):
        jobs.logs("nobody")


def test_what_ray_says_is_passed_on(dashboard: RayDashboard) -> None:
    dashboard.fail_status = 500
    with pytest.raises(ClusterError, match=r"HTTP 500: out of order"):
        RayJobs(dashboard.url).list()
    dashboard.fail_status = 401
    with pytest.raises(ClusterError, match="does not let you in") as caught:
        RayJobs(dashboard.url).version()
    assert "RAY_AUTH_TOKEN" in caught.value.hint


def test_nobody_answers(dashboard: RayDashboard) -> None:
    with RayDashboard() as gone:
        pass
    with pytest.raises(ClusterError, match="does not answer") as caught:
        RayJobs(gone.url).list()
    assert "port-forward" in caught.value.hint


def test_addresses(dashboard: RayDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RayJobs(f"127.0.0.1:{dashboard.port}").version() == "2.60.0"
    with pytest.raises(ClusterError, match="is a Ray Client address"):
        RayJobs("ray://host:10001")
    with pytest.raises(ClusterError, match="module sagemaker_ray is not installed") as caught:
        RayJobs("sagemaker_ray://studio/team")
    assert "pip install toolkit-for-ray-on-sagemaker-ai" in caught.value.hint


@pytest.mark.parametrize("address", ["", "http://", "http://host:port", "http://[", "https://", "my host", "http:///x"])
def test_what_is_no_address_is_refused_before_anybody_is_asked(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        RayJobs(address)


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without Ray's settings, and a home without its file."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_tokens_are_found_where_ray_looks_for_them(
    dashboard: RayDashboard, no_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent() -> str | None:
        RayJobs(dashboard.url).version()
        return dashboard.headers[-1].get("authorization")

    assert sent() is None
    (no_token / ".ray").mkdir()
    (no_token / ".ray/auth_token").write_text("of-the-file\n")
    assert sent() == "Bearer of-the-file"
    (no_token / "mine").write_text("of-my-file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(no_token / "mine"))
    assert sent() == "Bearer of-my-file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert sent() == "Bearer of-the-environment"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert sent() is None
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (no_token / "mine").unlink()
    with pytest.raises(ClusterError, match=r"RAY_AUTH_TOKEN_PATH .* cannot be read"):
        sent()


def test_a_token_that_ray_made_for_this_machine_is_sent_to_no_other(no_token: Path) -> None:
    (no_token / ".ray").mkdir()
    (no_token / ".ray/auth_token").write_text("of-the-file")
    assert "Authorization" in RayJobs("http://localhost:1")._headers
    assert "Authorization" not in RayJobs("http://ray.example.com:8265")._headers


def test_a_module_knows_the_way_and_its_cookies(dashboard: RayDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def way(inner: str) -> SimpleNamespace:
        asked.append(inner)
        if inner == "broken":
            raise RuntimeError("no endpoint")
        url = f"{dashboard.url}/"
        return SimpleNamespace(address=url, cookies={"ray_session": "x"}, headers={"X-A": "1"}, metadata=None)

    module = SimpleNamespace(get_job_submission_client_cluster_info=way)
    monkeypatch.setitem(sys.modules, "sagemaker_ray", module)  # type: ignore[arg-type]
    assert RayJobs("sagemaker_ray://studio/team").version() == "2.60.0"
    assert asked == ["studio/team"]
    assert dashboard.headers[-1]["cookie"] == "ray_session=x"
    assert dashboard.headers[-1]["x-a"] == "1"
    with pytest.raises(ClusterError, match="no endpoint"):
        RayJobs("sagemaker_ray://broken")


def test_the_dashboard_of_a_ray_cluster() -> None:
    cluster = {"metadata": {"name": "studio", "namespace": "team"}}
    assert head_address(cluster) == "http://studio-head-svc.team.svc:8265"
    named = {**cluster, "status": {"head": {"serviceName": "other-svc"}}}
    assert head_address(named) == "http://other-svc.team.svc:8265"
