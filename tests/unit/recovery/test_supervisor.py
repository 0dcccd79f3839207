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
from argusrl.errors import StorageError
from argusrl.journal.attempts import read_verdict
from argusrl.recovery import supervisor
from argusrl.recovery.supervisor import supervise
from argusrl.storage.layout import RunFolder

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    return RunFolder(tmp_path / "run")


def use(monkeypatch, tmp_path, script: str) -> None:
    """The driver is `script`; its arguments are the run folder and the number of the attempt."""
    path = tmp_path / "driver.py"
    path.write_text("import os, signal, sys, time\nattempt = int(sys.argv[2])\n" + textwrap.dedent(script))
    monkeypatch.setattr(supervisor, "DRIVER", [sys.executable, str(path)])


def run(folder, **recovery) -> tuple[int, list[str]]:
    return run_with(folder, ["cluster.address=auto", *(f"recovery.{name}={value}" for name, value in recovery.items())])


def run_with(folder, overrides: list[str]) -> tuple[int, list[str]]:
    said: list[str] = []
    return supervise(folder, load_config(RECIPE, overrides).config, say=said.append), said


@pytest.mark.parametrize("code", [0, 2, 6, 75])
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
config = load_config(sys.argv[3], ["recovery.grace_seconds=1", "cluster.address=auto"]).config
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_during_the_save_does_no_harm(tmp_path, folder, number):
    driver, started, saving = tmp_path / "driver.py", tmp_path / "started", tmp_path / "saving"
    driver.write_text(f"""
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path({str(saving)!r}).touch()
    while not pathlib.Path({str(tmp_path / "go on")!r}).exists():
        time.sleep(0.02)
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(started)!r}).touch()
time.sleep(60)
""")
    supervised = SUPERVISED.replace("grace_seconds=1", "grace_seconds=30")
    process = subprocess.Popen([sys.executable, "-c", supervised, driver, folder.path, RECIPE])
    wait_for(started, process)
    process.send_signal(number)
    wait_for(saving, process)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    (tmp_path / "go on").touch()
    assert process.wait(timeout=20) == 75
    assert (tmp_path / "saved").exists()


def wait_for(path: Path, process) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (6, 6), (8, 8), (5, 75), (7, 75), (9, 75), (1, 75)])
def test_after_a_stop_signal_only_what_would_come_again_keeps_its_code(tmp_path, folder, code, expected):
    driver, started = tmp_path / "driver.py", tmp_path / "started"
    driver.write_text(
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
        f"open({str(started)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, driver, folder.path, RECIPE])
    wait_for(started, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == expected


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


BEAT = """
from pathlib import Path
from argusrl.journal.attempts import Heartbeat, write_heartbeat
from argusrl.storage.layout import RunFolder
folder = RunFolder(Path(sys.argv[1]))
def beat():
    write_heartbeat(folder, attempt, Heartbeat(time=time.time(), pid=1, host="", epoch=1, step=0, phase="rollout"))
beat()
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_stopped_driver_is_killed_and_started_again(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, BEAT + "if attempt == 1: os.kill(os.getpid(), signal.SIGSTOP)")
    code, said = run(folder, driver_silence_seconds=0.2)
    assert code == 0
    assert "no heartbeat" in said[0]
    verdict = read_verdict(folder, 1)
    assert (verdict.outcome, verdict.exit_code) == ("killed", 11)


@pytest.mark.usefixtures("quick")
def test_a_driver_that_hangs_again_and_again_ends_the_run(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, BEAT + "os.kill(os.getpid(), signal.SIGSTOP)")
    code, said = run(folder, driver_silence_seconds=0.1)
    assert code == 11
    assert len(list(folder.attempts.iterdir())) == 3
    assert "trying again would not help" in said[-1]


@pytest.mark.usefixtures("quick")
def test_a_driver_that_beats_is_left_alone_however_long_it_takes(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, BEAT + "for _ in range(30):\n    time.sleep(0.05)\n    beat()")
    assert run(folder, driver_silence_seconds=0.6) == (0, [])


@pytest.mark.usefixtures("quick")
def test_a_driver_is_not_blamed_for_storage_that_takes_no_writes(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, BEAT + "time.sleep(0.6)")
    monkeypatch.setattr(supervisor, "write_problem", lambda _: "no space left")
    assert run(folder, driver_silence_seconds=0.1) == (0, [])


def test_the_supervisor_of_the_loser_stops_and_says_why(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "sys.exit(8)")
    code, said = run(folder)
    assert code == 8
    assert "another argusrl train drives this run" in said[-1]


def test_a_killed_driver_whose_run_another_supervisor_took_over_is_not_started_again(monkeypatch, tmp_path, folder):
    use(
        monkeypatch,
        tmp_path,
        """
        from pathlib import Path
        from argusrl.journal.epochs import claim_epoch
        from argusrl.storage.layout import RunFolder
        claim_epoch(RunFolder(Path(sys.argv[1])), {"attempt": attempt})
        (Path(sys.argv[1]) / "attempts" / "007").mkdir()
        claim_epoch(RunFolder(Path(sys.argv[1])), {"attempt": 7})
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    code, said = run(folder)
    assert code == 8
    assert "attempt 7" in said[-1]


def test_a_run_folder_that_is_away_is_waited_for_and_never_made_anew(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(supervisor, "_PAUSE_SECONDS", 0.01)
    use(monkeypatch, tmp_path, "")
    folder.path.rename(tmp_path / "away")
    said = []

    def say(text):
        said.append(text)
        assert not folder.path.exists()
        (tmp_path / "away").rename(folder.path)

    assert supervise(folder, load_config(RECIPE, ["cluster.address=auto"]).config, say=say) == 0
    assert "is not there" in said[0]
    folder.path.rename(tmp_path / "away")
    with pytest.raises(StorageError, match="is not there"):
        run(folder, storage_wait_seconds=0.05)
    assert not folder.path.exists()


def test_a_driver_that_met_a_storage_fault_is_started_again_once_storage_is_well(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(supervisor, "_PAUSE_SECONDS", 0.01)
    use(monkeypatch, tmp_path, "sys.exit(5 if attempt == 1 else 0)")
    problems = iter([None, "/run has 1 MiB of free space", None])
    monkeypatch.setattr(supervisor, "storage_problem", lambda *_: next(problems))
    code, said = run(folder)
    assert code == 0
    assert any("1 MiB" in text for text in said)
    assert len(list(folder.attempts.iterdir())) == 2


def test_storage_that_a_driver_waited_for_in_vain_is_not_waited_for_as_long_again(monkeypatch, tmp_path, folder):
    use(monkeypatch, tmp_path, "time.sleep(0.2); sys.exit(5)")
    problems = iter([None, "still full", "still full"])
    monkeypatch.setattr(supervisor, "storage_problem", lambda *_: next(problems))
    with pytest.raises(StorageError, match="still full"):
        run(folder, storage_wait_seconds=0.15)


class FakeHead:
    """Stands in for LocalHead: counts how many are started and stopped."""

    started: list[FakeHead]

    def __init__(self) -> None:
        self.stopped = False
        self.lives = True

    @classmethod
    def start(cls, section) -> FakeHead:
        cls.started.append(cls())
        return cls.started[-1]

    @property
    def environment(self) -> dict[str, str]:
        return {"HEAD": str(len(self.started))}

    def alive(self) -> bool:
        return self.lives

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def heads(monkeypatch):
    FakeHead.started = []
    monkeypatch.setattr(supervisor, "LocalHead", FakeHead)
    return FakeHead.started


def test_the_head_outlives_drivers_and_ends_with_the_run(monkeypatch, tmp_path, folder, heads):
    use(monkeypatch, tmp_path, "assert os.environ['HEAD'] == '1'\nif attempt < 3: os.kill(os.getpid(), 9)")
    assert run_with(folder, [])[0] == 0
    assert [head.stopped for head in heads] == [True]


def test_another_head_is_started_when_there_is_none_that_works(monkeypatch, tmp_path, folder, heads):
    use(monkeypatch, tmp_path, "sys.exit(7 if os.environ['HEAD'] == '1' else 0)")
    assert run_with(folder, [])[0] == 0
    assert [head.stopped for head in heads] == [True, True]


@pytest.mark.usefixtures("quick")
def test_a_driver_that_outlives_its_head_is_ended(monkeypatch, tmp_path, folder, heads):
    monkeypatch.setattr(supervisor, "_HEAD_LOSS_SECONDS", 0.05)
    use(monkeypatch, tmp_path, "if os.environ['HEAD'] == '1': time.sleep(60)")
    monkeypatch.setattr(FakeHead, "alive", lambda self: self is not heads[0])
    code, said = run_with(folder, [])
    assert code == 0
    assert "head died" in said[0]
    assert read_verdict(folder, 1).exit_code == 7


def test_a_run_that_joins_a_cluster_starts_no_head(monkeypatch, tmp_path, folder, heads):
    use(monkeypatch, tmp_path, "assert 'HEAD' not in os.environ")
    assert run(folder)[0] == 0
    assert heads == []


def test_the_head_ends_on_every_way_out(monkeypatch, tmp_path, folder, heads):
    use(monkeypatch, tmp_path, "sys.exit(2)")
    assert run_with(folder, [])[0] == 2
    folder.config.unlink()
    with pytest.raises(StorageError):
        run_with(folder, ["recovery.storage_wait_seconds=0.01"])
    assert [head.stopped for head in heads] == [True, True]
