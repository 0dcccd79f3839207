"""CPU seconds of a command and of what it leaves behind."""

import subprocess
import sys
import time

from fakes.benchmark import load_benchmark

process_tree = load_benchmark("process_tree")
BUSY = "import time\nwhile time.process_time() < 0.5: pass\n"


def test_a_child_in_a_session_of_its_own_is_counted() -> None:
    tree = process_tree.ProcessTree()
    began = time.time()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], start_new_session=True)"
    assert tree.start([sys.executable, "-c", code], stdout=subprocess.DEVNULL).wait() == 0
    tree.stop()
    assert tree.between(began, time.time()) >= 0.2
    assert tree.peak_pss_bytes > 0


def test_what_was_used_by_a_moment_is_interpolated() -> None:
    process = process_tree.Process(1, "x", times=[10.0, 12.0], cpu_seconds=[1.0, 2.0])
    assert [process.used_until(moment) for moment in (9.0, 10.0, 11.0, 12.0, 13.0)] == [0.0, 1.0, 1.5, 2.0, 2.0]
