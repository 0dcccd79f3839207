"""argusrl cluster watch, by the real client against an API server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from argusrl.cli.cluster import watch
from argusrl.cli.main import run
from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.manifests.render import render
from argusrl.cluster.names import FOLDER_ANNOTATION
from argusrl.config.load import load_config
from argusrl.journal.submissions import submissions
from argusrl.storage.layout import RunFolder

RECIPE = Path(__file__).parents[4] / "recipes" / "qwen3vl_8b_hyperpod.yaml"


@pytest.fixture
def job(server, tmp_path):
    """A RayJob in the cluster, and its run folder."""
    folder = RunFolder(tmp_path / "runs" / "qwen3vl_8b_hyperpod")
    folder.path.parent.mkdir()
    document = render(load_config(RECIPE, []).config)[-1].value
    document["metadata"]["annotations"][FOLDER_ANNOTATION] = str(folder.path)
    server.connect().create(RAY_JOB, document)
    return folder


def test_looks_once(job, capsys):
    assert run(["cluster", "watch", "--root", str(job.path.parent), "--once", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["row"], shown["action"]) == ("qwen3vl_8b_hyperpod", "stranger", "adopt")
    assert len(submissions(job)) == 1
    assert run(["cluster", "watch", "--root", str(job.path.parent), "--once"]) == 0
    assert "starting" in capsys.readouterr().out


def test_says_that_there_is_nothing(server, tmp_path, capsys):
    assert run(["cluster", "watch", "--root", str(tmp_path), "--namespace", "team", "--once"]) == 0
    assert "no runs" in capsys.readouterr().out


def test_needs_the_file_system(server, tmp_path, capsys):
    assert run(["cluster", "watch", "--root", str(tmp_path / "nowhere"), "--once"]) == 2
    assert "is not there" in capsys.readouterr().err


def test_a_root_that_is_made_later_is_waited_for(server, tmp_path, monkeypatch, capsys):
    """The controller is installed before anybody can make a folder on a new file system: it does not crash."""
    root = tmp_path / "runs"
    seen = []
    monkeypatch.setattr(watch, "_ROOT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "_watch", lambda controller, as_json: seen.append(controller.root))
    maker = threading.Timer(0.1, root.mkdir)
    maker.start()
    assert run(["cluster", "watch", "--root", str(root)]) == 0
    maker.join()
    assert seen == [root]
    assert f"waiting: {root} is not there" in capsys.readouterr().out


def test_waiting_for_the_root_ends_at_sigterm(server, tmp_path):
    command = [sys.executable, "-m", "argusrl.cli.main", "cluster", "watch", "--root", str(tmp_path / "nowhere")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "waiting" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_ends_at_sigterm(job):
    command = [sys.executable, "-m", "argusrl.cli.main", "cluster", "watch", "--root", str(job.path.parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "watching runs" in process.stdout.readline()
    assert "stranger" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert len(submissions(job)) == 1
