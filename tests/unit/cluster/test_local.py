"""The local head with small scripts in place of `ray start`, and once with the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from argusrl.cluster import local
from argusrl.cluster.local import LocalHead, await_address
from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError

READY = """
temporary = Path(sys.argv[sys.argv.index("--temp-dir") + 1])
temporary.mkdir()
(temporary / "ray_current_cluster").write_text("127.0.0.1:1234")
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a head whose command is a script; whatever a test leaves is killed."""
    heads = []

    def make(script: str, section: ClusterSection | None = None) -> LocalHead:
        path = tmp_path / f"ray{len(heads)}.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\nfrom pathlib import Path\n" + textwrap.dedent(script)
        )
        monkeypatch.setattr(local, "COMMAND", [sys.executable, "-S", str(path)])
        heads.append(LocalHead.start(section or ClusterSection()))
        return heads[-1]

    yield make
    for head in heads:
        head.stop(0.0)


def living(pid: int) -> bool:
    return local._session_of(Path("/proc", str(pid))) is not None


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_address_is_known_once_the_command_has_written_it(start):
    head = start(READY + "time.sleep(60)")
    assert head.wait(20) == "127.0.0.1:1234"
    assert await_address(head.environment, 0) == "127.0.0.1:1234"
    assert head.alive()
    assert head.pids() == [head.process.pid]


def test_a_head_that_ends_early_says_what_it_printed(start):
    head = start("sys.exit('no memory left for this')")
    with pytest.raises(ClusterError, match="no memory left for this"):
        head.wait(20)
    assert not head.alive()


def test_a_head_that_is_late_is_an_error_with_the_deadline(start):
    head = start("time.sleep(60)")
    with pytest.raises(ClusterError, match="not ready within 0 s"):
        head.wait(0.1)


def test_an_address_of_a_dead_head_does_not_count(start):
    head = start(READY)
    head.process.wait(20)
    with pytest.raises(ClusterError, match="has ended"):
        head.wait(20)


def test_without_a_head_the_error_says_how_runs_are_started():
    with pytest.raises(ClusterError, match="argusrl train"):
        await_address({}, 1.0)


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_leaves_no_process_and_no_folder(start, stubborn):
    """Children in sessions of their own included, whether or not they heed SIGTERM."""
    head = start(
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else "")
        + "subprocess.Popen(['sleep', '60'], start_new_session=True)\nsubprocess.Popen(['sleep', '60'])\n"
        + READY
        + "time.sleep(60)"
    )
    head.wait(20)
    pids = head.pids()
    assert len(pids) == 3
    head.stop(0.2)
    assert not any(map(living, pids))
    assert not head.folder.exists()
    head.stop()  # again does no harm


def test_the_head_gets_what_it_needs_and_the_token_stays_private(start, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    head = start(READY + "time.sleep(60)", ClusterSection(slots=3, cpus_per_slot=50.5))
    head.wait(20)
    environ = local._environment_of(Path("/proc", str(head.process.pid)))
    command = Path(f"/proc/{head.process.pid}/cmdline").read_text().split("\0")
    assert command[command.index("--num-cpus") + 1] == "152"
    assert head.token.encode() in environ
    assert b"RAY_ADDRESS" not in environ
    assert head.token not in " ".join(command)
    assert head.folder.stat().st_mode & 0o077 == 0
    assert len(head.folder.as_posix()) < 50  # sockets below it have a length limit


def test_two_heads_have_their_own_tokens(start):
    assert start("time.sleep(60)").token != start("time.sleep(60)").token


def test_the_leavings_of_a_killed_supervisor_are_removed_and_living_heads_are_not(start, monkeypatch):
    monkeypatch.setattr(local, "_LEAVING_SECONDS", 0.0)
    dead, alive = start("sys.exit(1)"), start("time.sleep(60)")
    dead.process.wait(20)
    start("time.sleep(60)")
    assert not dead.folder.exists()
    assert alive.folder.exists()


def test_a_head_dies_with_the_process_that_started_it(tmp_path):
    script = f"""
        import os, sys
        from pathlib import Path
        from argusrl.cluster import local
        from argusrl.config.sections import ClusterSection
        local.COMMAND = [sys.executable, "-c", "import time; time.sleep(60)"]
        head = local.LocalHead.start(ClusterSection())
        print(head.process.pid, head.folder, flush=True)
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    """
    output = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True).stdout
    pid, folder = output.split()
    until(lambda: not living(int(pid)))
    (Path(folder) / "head.log").unlink()
    Path(folder).rmdir()


def test_the_real_command_can_be_joined_and_leaves_nothing():
    """One head, two drivers one after the other: the second finds the actor of the first."""
    driver = """
        import os, ray
        from argusrl.cluster.local import await_address
        ray.init(address=await_address(os.environ, 60), namespace="run", log_to_driver=False)
        class Actor:
            def pid(self):
                return os.getpid()
        actor = ray.remote(Actor).options(name="a", lifetime="detached", get_if_exists=True, num_cpus=0).remote()
        print(ray.get(actor.pid.remote()))
    """
    head = LocalHead.start(ClusterSection())
    try:
        environment = {**os.environ, **head.environment}
        command = [sys.executable, "-c", textwrap.dedent(driver)]
        first, second = (
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120).stdout.strip()
            for _ in range(2)
        )
        assert first
        assert first == second
        assert int(first) in head.pids()
        raylet = next(pid for pid in head.pids() if b"raylet/raylet" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(raylet, signal.SIGKILL)
        until(lambda: not head.alive())
    finally:
        head.stop()
    assert head.pids() == []
    assert not head.folder.exists()
