from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from argusrl.cluster import pool as pool_module
from argusrl.cluster.pool import PoolDied, PoolRaised, PoolTimeout, ProcessPool

USER = str(Path(__file__).with_name("pool_functions.py"))
LONG = 60.0  # seconds; never reached by a test that passes


@asynccontextmanager
async def opened(processes: int = 1) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(processes)
    try:
        yield pool
    finally:
        await pool.close()


def in_pool(scenario, processes: int = 1):
    async def run():
        async with opened(processes) as pool:
            return await scenario(pool)

    return asyncio.run(run())


def test_calls_run_in_another_process_and_user_code_stays_out_of_this_one() -> None:
    async def scenario(pool):
        assert await pool.call(f"{USER}:add", {"a": 2, "b": 3}, LONG) == 5
        assert await pool.call(f"{USER}:runs_a_loop", {}, LONG) == "looped"
        assert len(await pool.call(f"{USER}:long_text", {"length": 3_000_000}, LONG)) == 3_000_000
        return await pool.call(f"{USER}:process_id", {}, LONG)

    assert in_pool(scenario) != os.getpid()
    assert not any("pool_functions" in name for name in sys.modules)


def test_describe_names_parameters() -> None:
    async def scenario(pool):
        description = await pool.describe(f"{USER}:add")
        assert description == {"is_async": False, "parameters": ["a", "b"], "required": ["a"], "takes_any": False}
        assert (await pool.describe(f"{USER}:sleeps"))["is_async"]

    in_pool(scenario)


def test_an_exception_comes_back_with_its_traceback_and_the_process_lives_on() -> None:
    async def scenario(pool):
        before = await pool.call(f"{USER}:process_id", {}, LONG)
        with pytest.raises(PoolRaised, match="ValueError: seven") as caught:
            await pool.call(f"{USER}:raises", {"text": "seven"}, LONG)
        assert "pool_functions.py" in caught.value.traceback
        assert "pool_worker" not in caught.value.traceback
        with pytest.raises(PoolRaised, match="SystemExit"):
            await pool.call(f"{USER}:leaves", {"code": 3}, LONG)
        with pytest.raises(PoolRaised, match="Local"):
            await pool.call(f"{USER}:own_class", {}, LONG)
        with pytest.raises(PoolRaised, match="cannot be read outside"):
            await pool.call(f"{USER}:own_instance", {}, LONG)
        with pytest.raises(PoolRaised, match="cannot be sent"):
            await pool.call(f"{USER}:add", {"a": lambda: 0}, LONG)
        with pytest.raises(PoolRaised, match="nothing_here"):
            await pool.call(f"{USER}:nothing_here", {}, LONG)
        assert await pool.call(f"{USER}:process_id", {}, LONG) == before

    in_pool(scenario)


@pytest.mark.parametrize(
    ("function", "arguments", "how"),
    [("ends", {"code": 7}, "exited with code 7"), ("crashes", {}, "killed by SIG(SEGV|BUS)")],
)
def test_a_call_that_ends_its_process_fails_alone(function: str, arguments: dict, how: str) -> None:
    async def scenario(pool):
        bad = pool.call(f"{USER}:{function}", arguments, LONG)
        good = [pool.call(f"{USER}:add", {"a": number}, LONG) for number in range(3)]
        results = await asyncio.gather(bad, *good, return_exceptions=True)
        assert isinstance(results[0], PoolDied)
        assert not results[0].innocent
        with pytest.raises(PoolDied, match=how):
            raise results[0]
        assert results[1:] == [1, 2, 3]

    in_pool(scenario)


def test_a_deadline_kills_what_hangs_and_its_children(tmp_path: Path) -> None:
    async def scenario(pool):
        with pytest.raises(PoolTimeout, match="longer than 2 s"):
            await pool.call(f"{USER}:hangs_with_child", {"path": str(tmp_path / "pid")}, 2.0)
        assert await pool.call(f"{USER}:add", {"a": 1}, LONG) == 2

    in_pool(scenario)
    grandchild = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_forked_copy_does_not_answer_twice() -> None:
    async def scenario(pool):
        assert await pool.call(f"{USER}:forks", {}, LONG) == "once"
        assert await pool.call(f"{USER}:add", {"a": 1}, LONG) == 2
        with pytest.raises(PoolDied):  # seen although the copy may still hold the socket
            await pool.call(f"{USER}:ends", {"code": 1}, LONG)

    in_pool(scenario)


def test_coroutine_functions_run_side_by_side_in_one_process(tmp_path: Path) -> None:
    async def scenario(pool):
        arguments = {"path": str(tmp_path / "dots"), "count": 5}
        found = await asyncio.gather(*(pool.call(f"{USER}:meets", arguments, LONG) for _ in range(5)))
        assert len(set(found)) == 1

    in_pool(scenario)


def test_a_late_coroutine_is_cancelled_and_a_blocking_one_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CANCEL_SECONDS", 0.3)

    async def scenario(pool):
        with pytest.raises(PoolTimeout, match="cancelled"):
            await pool.call(f"{USER}:sleeps", {}, 0.1)
        with pytest.raises(PoolTimeout, match="killed"):
            await pool.call(f"{USER}:blocks", {}, 0.1)

    in_pool(scenario)


def test_objects_keep_state_and_their_process() -> None:
    async def scenario(pool):
        counters = [await pool.create(f"{USER}:Counter", {"start": 10 * n}, LONG) for n in range(4)]
        assert [await c.call("up", deadline_seconds=LONG) for c in counters] == [1, 11, 21, 31]
        assert await counters[0].call("up", deadline_seconds=LONG) == 2
        processes = [await c.call("process_id", deadline_seconds=LONG) for c in counters]
        assert sorted(map(processes.count, set(processes))) == [2, 2]
        await counters[0].release()
        await counters[0].release()
        with pytest.raises(PoolRaised, match="KeyError"):
            await counters[0].call("up", deadline_seconds=LONG)

    in_pool(scenario, processes=2)


def test_a_hanging_object_dies_and_its_neighbour_learns_that_it_died_innocently() -> None:
    async def scenario(pool):
        bad, neighbour = [await pool.create(f"{USER}:Counter", {}, LONG) for _ in range(2)]
        results = await asyncio.gather(
            bad.call("hang", deadline_seconds=0.3),
            neighbour.call("up", deadline_seconds=LONG),
            return_exceptions=True,
        )
        assert isinstance(results[0], PoolTimeout)
        assert isinstance(results[1], PoolDied)
        assert results[1].innocent
        await neighbour.release()
        again = await pool.create(f"{USER}:Counter", {}, LONG)
        assert await again.call("up", deadline_seconds=LONG) == 1

    in_pool(scenario)


def test_a_cancelled_caller_does_not_free_the_process_before_its_deadline(tmp_path: Path) -> None:
    async def scenario(pool):
        bad = await pool.create(f"{USER}:Counter", {}, LONG)
        begun = tmp_path / "begun"
        hanging = asyncio.create_task(bad.call("wait_then_hang", str(begun), deadline_seconds=2.0))
        while not begun.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.01)
        hanging.cancel()
        # The second call has to wait for the first one's deadline, and then gets a process of its own.
        assert await pool.call(f"{USER}:add", {"a": 1}, 1.9) == 2
        with pytest.raises(asyncio.CancelledError):
            await hanging

    in_pool(scenario)


def test_a_process_that_cannot_be_started_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()

    async def scenario(pool):
        files = me.num_fds()
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(PoolDied, match="no process can be started"):
            await pool.call(f"{USER}:add", {"a": 1}, LONG)
        assert me.num_fds() == files
        monkeypatch.undo()
        assert await pool.call(f"{USER}:add", {"a": 1}, LONG) == 2

    in_pool(scenario)


def test_close_ends_what_runs_and_nothing_starts_afterwards() -> None:
    async def scenario(pool):
        hanging = asyncio.create_task(pool.call(f"{USER}:hangs", {}, LONG))
        waiting = asyncio.create_task(pool.call(f"{USER}:add", {"a": 1}, LONG))
        await pool.describe(f"{USER}:hangs")
        await asyncio.sleep(0.05)
        await pool.close()
        results = await asyncio.gather(hanging, waiting, return_exceptions=True)
        assert all(isinstance(result, PoolDied) for result in results)
        with pytest.raises(PoolDied, match="closed"):
            await pool.call(f"{USER}:add", {"a": 1}, LONG)

    in_pool(scenario)
    assert not psutil.Process().children()


def test_fifty_kills_leave_no_zombie_and_no_open_file() -> None:
    me = psutil.Process()

    async def scenario(pool):
        await pool.call(f"{USER}:add", {"a": 1}, LONG)
        files, threads = me.num_fds(), me.num_threads()
        for _ in range(50):
            with pytest.raises(PoolDied):
                await pool.call(f"{USER}:ends", {"code": 1}, LONG)
        await pool.call(f"{USER}:add", {"a": 1}, LONG)
        assert len(me.children()) == 1
        assert me.num_fds() == files
        assert me.num_threads() <= threads + 1  # the newest dead child's watcher may be on its last line

    in_pool(scenario)
    assert not me.children()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_children_die_with_their_parent() -> None:
    program = f"""
import asyncio, os
from argusrl.cluster.pool import ProcessPool
async def main():
    pool = ProcessPool()
    print(await pool.call({USER + ":process_id"!r}, {{}}, 60.0), flush=True)
    input()
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""

    async def scenario():
        pipe = asyncio.subprocess.PIPE
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = psutil.Process(int(await parent.stdout.readline()))
        parent.stdin.write(b"\n")
        await parent.wait()
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    asyncio.run(scenario())
