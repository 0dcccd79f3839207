"""The supervisor with real child processes: small scripts in place of the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from argusrl.config.load import load_config
from argusrl.journal.attempts import read_verdict
from argusrl.recovery import supervisor
from argusrl.recovery.supervisor import supervise
from argusrl.storage.layout import RunFolder

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def use(monkeypatch, tmp_path, script: str) -> None:
    """The driver is `script`; its arguments are the run folder and the number of the attempt."""
    path = tmp_path / "driver.py"
    path.write_text("import os, signal, sys, time\nattempt = int(sys.argv[2])\n" + textwrap.dedent(script))
    monkeypatch.setattr(supervisor, "DRIVER", [sys.executable, str(path)])


def run(folder, **recovery) -> tuple[int, list[str]]:
    overrides = [f"recovery.{name}={value}" for name, value in recovery.items()]
    said: list[str] = []
    return supervise(folder, load_config(RECIPE, overrides).config, say=said.append), said


@pytest.mark.parametrize("code", [0, 2, 5, 75])
def test_a_final_code_is_the_codes_end(monkeypatch, tmp_path, folder, code):
    use(monkeypatch, tmp_path, f"sys.exit({code})")
    assert run(folder)[0] == code
    assert len(list(folder.attempts.iterdir())) == 1
    assert read_verdict(folder, 1).exit_code == code


def test_a_killed_driver_is_started_again(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "if attempt == 1: os.kill(os.getpid(), signal.SIGKILL)")
    code, said = run(folder)
    assert code == 0
    assert "SIGKILL" in said[0]
    verdict = read_verdict(folder, 1)
    assert (verdict.outcome, verdict.exit_code) == ("killed", -signal.SIGKILL)


def test_the_same_fault_again_and_again_ends_the_run(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "sys.exit(9)")
    assert run(folder)[0] == 9
    assert len(list(folder.attempts.iterdir())) == 3


def test_no_restarts_where_none_are_wanted(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "sys.exit(9)")
    assert run(folder, max_restarts=0)[0] == 9
    assert len(list(folder.attempts.iterdir())) == 1


def test_each_attempt_keeps_the_config_it_ran_with(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "sys.exit(0)")
    run(folder)
    assert (folder.attempt(1) / "config.yaml").is_file()


SUPERVISED = """
import sys
from pathlib import Path
from argusrl.config.load import load_config
from argusrl.recovery import supervisor
from argusrl.storage.layout import RunFolder
supervisor.DRIVER = [sys.executable, sys.argv[1]]
config = load_config(sys.argv[3], ["recovery.grace_seconds=1"]).config
sys.exit(supervisor.supervise(RunFolder(Path(sys.argv[2])), config, say=print))
"""


@pytest.mark.parametrize(
    "script",
    [
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))",  # seals and stops
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",  # is killed when the grace time is over
        "",  # dies of the signal before it could seal anything
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_asks_the_driver_and_ends_with_the_code_to_resume(tmp_path, folder, script, number):
    driver = tmp_path / "driver.py"
    started = tmp_path / "started"
    driver.write_text(
        f"import signal, sys, time\n{script}\nopen({str(started)!r}, 'w').write(str(__import__('os').getpid()))\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, driver, folder.path, RECIPE])
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=20) == 75
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_driver_does_not_outlive_its_supervisor(tmp_path, folder):
    driver = tmp_path / "driver.py"
    started = tmp_path / "started"
    driver.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, driver, folder.path, RECIPE])
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=10)
    status = Path(f"/proc/{started.read_text()}/stat")
    for _ in range(250):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":  # gone, or not yet buried
            return
        time.sleep(0.02)
    pytest.fail("the driver is still there")


def test_why_no_attempt_is_left_is_said(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "sys.exit(9)")
    _, said = run(folder, max_restarts=0)
    assert "recovery.max_restarts = 0" in said[-1]
    _, said = run(folder)
    assert "3 attempts ended like this" in said[-1]


def test_what_a_driver_wrote_counts_more_than_how_its_process_ended(monkeypatch, tmp_path, folder):
    """Libraries crash while an interpreter ends; the run is complete all the same."""
    use(
        monkeypatch,
        tmp_path,
        """
        from pathlib import Path
        from argusrl.journal.attempts import Verdict, write_verdict
        from argusrl.storage.layout import RunFolder
        write_verdict(RunFolder(Path(sys.argv[1])), attempt, Verdict(outcome="complete", exit_code=0, reason="done"))
        os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    assert run(folder) == (0, [])
    assert read_verdict(folder, 1).complete
