"""A reward service that goes away in the middle of a run, and a secret that must not leave the process."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from argusrl.journal.verify import verify_run
from argusrl.observe.events import read_events
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from e2e.conftest import QUICKSTART, ROOT, SMALL, command, environment
from fakes.reward_service import Service

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

SECRET = "tell-nobody-4711"


def paid(_: int, body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"rewards": [float(str(item["answer"]) in item["reply"]) for item in body["items"]]}


def test_a_service_that_is_down_pauses_the_run_and_its_token_stays_secret(runs):
    service = Service()
    service.answer = paid
    reward = f"{{kind: http, url: '{service.url}', token: 'env:REWARD_TOKEN', attempts: 1, timeout_seconds: 5}}"
    words = command("train", QUICKSTART, f"run.root={runs}", "run.name=service", *SMALL, f"rewards=[{reward}]")
    words += ["rollout.pause_probe_seconds=1", "evaluate.every_steps=0", "rollout.retries=0"]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**environment(), "REWARD_TOKEN": SECRET, "NO_PROXY": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = RunFolder(runs / "service")
    while not folder.commit(1).exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    service.answer = lambda *_: (503, "down for maintenance")
    while not any(event["kind"] == "paused" for event in read_events(folder.events)):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    service.answer = paid
    out, _ = process.communicate(timeout=120)
    service.close()
    assert process.returncode == 0, out
    (pause, *_) = [event for event in read_events(folder.events) if event["kind"] == "paused"]
    assert "reward http" in pause["message"]
    assert "503" in pause["message"]
    rows = [row for row in read_lines(folder.metrics) if row["step"] > 0]
    assert [row["rollout/trajectories"] for row in rows] == [32, 32, 32]
    assert verify_run(folder) == []
    assert set(service.authorizations) == {f"Bearer {SECRET}"}
    assert SECRET not in out
    written = [path for path in folder.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
