"""Whatever dies wherever: what was acknowledged is there, what was not is whole or absent, and the run goes on."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argusrl.errors import CorruptionError
from argusrl.journal.commits import Adopted, CommitChain, rebuild_metrics
from argusrl.journal.epochs import claim_epoch
from argusrl.journal.retention import collect_garbage, sweep_temporaries
from argusrl.journal.segments import SegmentHeader, SegmentWriter, read_segment
from argusrl.journal.verify import verify_run
from argusrl.storage.layout import RunFolder
from fakes.run_folder import RunBuilder, memory_folder

HEADER = SegmentHeader(kind="trajectories", step=1, epoch=1, writer="w")
FATAL = ("write", "fsync", "link", "rename", "replace", "unlink", "mkdir")


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


def in_child(action) -> tuple[int, bytes]:
    """Run action(pipe) in a forked process; its wait status and what it wrote to the pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            action(writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


def kill_at_call(number: int) -> None:
    """Storage call `number` of this process, from now on, is a SIGKILL; a killed write gets half its bytes out."""
    left = number

    def dying(name, original):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                if name == "write":
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return original(*arguments, **options)

        return call

    for name in FATAL:
        setattr(os, name, dying(name, getattr(os, name)))


def step_in_child(template: Path, root: Path, number: int) -> tuple[int, list[str]]:
    """Play and commit step 1 in a process that dies at call `number`; what it acknowledged before."""
    shutil.copytree(template, root)
    builder = RunBuilder.attach(root)

    def act(pipe):
        say, write = os.fdopen(pipe, "w", buffering=1), builder
        kill_at_call(number)
        journal = write.journal(1)
        refs = []
        for sample in range(2):
            refs.append(write.play(journal, "p0", sample, reward=float(sample)))
            journal.sync()
            print(f"finished {sample}", file=say)
        commit = write.chain.append(write.commit(1, [journal.seal()], refs))
        print("committed", file=say)
        write.note(commit)
        write.checkpoint(commit)

    status, said = in_child(act)
    return status, said.decode().splitlines()


def resume(builder: RunBuilder) -> set[int]:
    """What a new driver does: claim, adopt, finish the step, collect. The samples it did not have to play again."""
    builder.reopen()
    sweep_temporaries(builder.run)
    head = builder.chain.head()
    if head.step == 1:
        kept = {item.key.sample for item in head.trajectories}
    else:
        journal = builder.journal(1, "adopt")
        refs = list(journal.adopt(head.adapter.sha256).trajectories)
        kept = {ref.key.sample for ref in refs}
        refs += [builder.play(journal, "p0", sample, reward=float(sample)) for sample in {0, 1} - kept]
        builder.chain.append(builder.commit(1, [journal.seal()], refs))
    rebuild_metrics(builder.run)
    collect_garbage(builder.run, builder.chain, keep_checkpoints=1, keep_adapters=1)
    return kept


def test_a_driver_killed_at_any_storage_call_loses_nothing_acknowledged(tmp_path):
    RunBuilder(tmp_path / "template")
    number = survived = 0
    while not survived:
        root = tmp_path / f"killed-{number}"
        status, said = step_in_child(tmp_path / "template", root, number)
        survived = status == 0
        assert survived or os.WTERMSIG(status) == signal.SIGKILL
        builder = RunBuilder.attach(root)
        assert verify_run(builder.run) == [], f"after death at call {number}"
        if "committed" in said:
            assert CommitChain(builder.run).head().step == 1
        kept = resume(builder)
        assert kept >= {int(line.split()[1]) for line in said if line.startswith("finished")}
        assert [item.reward for item in sorted(builder.head.trajectories, key=lambda item: item.key)] == [0.0, 1.0]
        assert verify_run(builder.run) == [], f"after resuming from death at call {number}"
        builder.step()
        assert verify_run(builder.run) == []
        shutil.rmtree(root)
        number += 1
    assert number > 40, "the step makes more storage calls than that"


def test_a_torn_tail_gives_every_record_before_it(tmp_path):
    path = tmp_path / "w.seg"
    writer = SegmentWriter(path, HEADER)
    places = [writer.append(payload) for payload in (b"first", b"second" * 9, b"third" * 11)]
    writer.seal()
    data = path.read_bytes()
    ends = [place.offset + place.length for place in places]
    for size in range(places[1].offset, len(data)):
        path.write_bytes(data[:size])
        found = [place for place, _ in read_segment(path, require_sealed=False)]
        assert found == [place for place, end in zip(places, ends, strict=True) if end <= size]
        with pytest.raises(CorruptionError):
            list(read_segment(path, require_sealed=True))


def test_finished_trajectories_before_a_tear_are_adopted_and_none_else(tmp_path):
    builder = RunBuilder(tmp_path)
    old = builder.journal(1)
    refs = [builder.play(old, "p0", sample) for sample in range(3)]
    old.abandon()
    path = builder.run.absolute(refs[0].segment)
    data = path.read_bytes()
    ends = [ref.offset + ref.length for ref in refs]
    cuts = {end + shift for end in ends[1:] for shift in (-1, 0, 1)} | set(range(ends[0], len(data), 53))
    builder.reopen()
    for size in sorted(cuts):
        path.write_bytes(data[:size])
        journal = builder.journal(1, f"cut{size}")
        adopted = journal.adopt(builder.head.adapter.sha256)
        journal.abandon()
        assert [ref.key.sample for ref in adopted.trajectories] == [n for n, end in enumerate(ends) if end <= size]
        assert len(adopted.damaged) <= 1  # the record that was cut, where it was


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.binary(max_size=80), max_size=6), cut=st.integers(0, 600), flip=st.integers(0, 4800))
def test_any_payloads_any_cut_any_flip(tmp_path, payloads, cut, flip):
    path = tmp_path / "w.seg"
    path.unlink(missing_ok=True)
    writer = SegmentWriter(path, HEADER)
    places = [writer.append(payload) for payload in payloads]
    writer.seal()
    data = path.read_bytes()
    assert [payload for _, payload in read_segment(path, require_sealed=True)] == payloads
    path.write_bytes(data[:cut])
    whole = sum(place.offset + place.length <= cut for place in places)
    assert [payload for _, payload in read_segment(path, require_sealed=False)] == payloads[:whole]
    flipped = bytearray(data)
    flipped[flip // 8 % len(data)] ^= 1 << flip % 8
    path.write_bytes(flipped)
    with pytest.raises(CorruptionError):
        list(read_segment(path, require_sealed=True))


def test_processes_race_for_epochs(tmp_path):
    run = RunFolder(tmp_path / "run")

    def claim(pipe):
        numbers = [claim_epoch(run).number for _ in range(5)]
        os.write(pipe, " ".join(map(str, numbers)).encode())

    claimed = race([claim] * 4)
    assert sorted(int(number) for said in claimed for number in said.split()) == list(range(1, 21))


def test_processes_race_for_a_commit(tmp_path):
    """Each of four drivers saw the step open; the record that stands is the one all of them learn of."""
    builders = [RunBuilder(tmp_path)]
    for _ in range(3):
        builders.append(RunBuilder.attach(tmp_path))
        builders[-1].reopen()
    commits = [builder.commit(1, [], []) for builder in builders]

    def attempt(builder, commit):
        def act(pipe):
            type(builder.epoch).check = lambda _: None  # as if it had looked just before the next claim
            try:
                outcome = builder.chain.append(commit).nonce
            except Adopted as error:
                outcome = error.commit.nonce
            except Exception as error:
                outcome = type(error).__name__
            os.write(pipe, outcome.encode())

        return act

    outcomes = [said.decode() for said in race(list(map(attempt, builders, commits)))]
    winner = CommitChain(builders[0].run).head()
    for builder, outcome in zip(builders, outcomes, strict=True):
        assert outcome == (winner.nonce if builder.epoch.number >= winner.epoch else "FencedError")


def race(actions) -> list[bytes]:
    """Run all actions in processes of their own at the same time."""
    start, go = os.pipe()
    children = []
    for action in actions:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.read(start, 1)
                action(writer)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        children.append((child, reader))
    os.write(go, b"x" * len(actions))
    said = []
    for child, reader in children:
        with os.fdopen(reader, "rb") as pipe:
            said.append(pipe.read())
        assert os.waitpid(child, 0)[1] == 0
    os.close(start)
    os.close(go)
    return said
