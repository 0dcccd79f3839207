"""The Jobs API of a real Ray head with its dashboard."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.cluster.ray_jobs import RayJobs, RayJobView
from argusrl.errors import ClusterError
from fakes.kubernetes_recipe import RECIPE

pytestmark = [pytest.mark.ray, pytest.mark.slow]
_HEAD = {  # jobs find the interpreter as they do in an image, and SIGTERM means now
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
_START_SECONDS = 90.0
_JOB_SECONDS = 120.0


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """URL of the dashboard."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need short paths
    options = ["--head", "--block", "--port", "0", "--num-cpus", "2", "--object-store-memory", str(100 << 20)]
    options += ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(port)]
    options += ["--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats", "--temp-dir", folder]
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    process = subprocess.Popen(
        [sys.executable, "-m", "argusrl.cluster.ray_start", "start", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **access, **_HEAD},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in access.items():
                patch.setenv(name, value)
            await_dashboard(url, process)
            yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def await_dashboard(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            RayJobs(url).list()
        except ClusterError:
            assert process.poll() is None, "the Ray head has ended"
            assert time.monotonic() < deadline, "the dashboard is late"
            time.sleep(0.5)
        else:
            return


def ended(jobs: RayJobs, name: str) -> RayJobView:
    """Follow a job to its end."""
    deadline = time.monotonic() + _JOB_SECONDS
    while True:
        job = jobs.get(name)
        assert job is not None
        if job.ended:
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.5)


def test_a_command_runs_once_and_its_output_can_be_read(head: str) -> None:
    jobs = RayJobs(head)
    command = f"{sys.executable} -m argusrl.cli.main --version"
    assert jobs.submit("version-s1", command, metadata={"run": "version"})
    assert not jobs.submit("version-s1", command)
    said = f"argusrl {version('argusrl')}"
    assert "".join(jobs.follow("version-s1")).strip().endswith(said)
    job = ended(jobs, "version-s1")
    assert (job.status, job.metadata) == ("SUCCEEDED", {"run": "version"})
    assert said in jobs.logs("version-s1")
    assert jobs.status("version-s2") is None
    assert not jobs.stop("version-s1")


def test_a_submitted_recipe_reaches_argusrl_train_in_the_cluster(
    head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of this recipe is not there: the run gets as far as saying so."""
    root = tmp_path / "runs"
    paths = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train", f"data.heldout={tmp_path}/heldout"]
    overrides = ["run.name=maze", f"run.root={root}", f"cluster.kubernetes.volume.mount={tmp_path}", *paths]
    submit = ["cluster", "submit", str(RECIPE), *overrides, "--address", head]
    assert run(submit) == 0
    assert ended(RayJobs(head), "maze-s1").status == "FAILED"
    assert (root / ".recipes" / "maze" / "recipe.yaml").is_file()
    capsys.readouterr()
    assert run(["cluster", "logs", "maze", "--address", head]) == 0
    assert f"{tmp_path}/model" in capsys.readouterr().out
    assert run(["cluster", "status", "maze", "--address", head]) == 0
    assert "FAILED" in capsys.readouterr().out


def test_nobody_gets_in_without_the_token(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ClusterError, match="does not let you in"):
        RayJobs(head).list()


def test_a_job_is_stopped(head: str) -> None:
    jobs = RayJobs(head)
    jobs.submit("sleeper-s1", f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(600)'")
    for _ in jobs.follow("sleeper-s1"):
        break  # it runs
    assert run(["cluster", "stop", "sleeper", "--address", head]) == 0
    assert ended(jobs, "sleeper-s1").status == "STOPPED"
