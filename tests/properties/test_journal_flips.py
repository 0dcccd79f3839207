"""`argusrl runs verify` finds every changed, lost or added byte of what a run names."""

import random

import pytest

from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.retention import collect_garbage
from argusrl.journal.verify import verify_run
from fakes.run_folder import RunBuilder, memory_folder

FLIPS_PER_FILE, CUTS_PER_FILE = 10, 3


@pytest.fixture(scope="module")
def run():
    """Three steps by two drivers, adapters and a checkpoint retired, complete."""
    with memory_folder() as folder:
        builder = RunBuilder(folder)
        builder.step()
        builder.step()
        builder.reopen()
        builder.step()
        collect_garbage(builder.run, builder.chain, keep_checkpoints=2, keep_adapters=2)
        write_verdict(builder.run, next_attempt(builder.run), Verdict(outcome="complete", exit_code=0, reason="done"))
        assert verify_run(builder.run) == []
        yield builder.run


def named_files(run):
    """Everything but config.yaml and metrics.jsonl, whose white space carries nothing, and logs."""
    folders = ("commits", "epochs", "trajectories", "images", "adapters", "checkpoints", "retired", "attempts")
    files = [path for name in folders for path in sorted((run.path / name).rglob("*")) if path.is_file()]
    assert len(files) > 20
    return files


@pytest.mark.parametrize("seed", [0, 1])
def test_flipped_bits(run, seed):
    chance = random.Random(seed)
    for path in named_files(run):
        data = path.read_bytes()
        for _ in range(FLIPS_PER_FILE):
            place, bit = chance.randrange(len(data)), chance.randrange(8)
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            assert verify_run(run), f"bit {bit} of byte {place} of {path} flipped"
        path.write_bytes(data)
    assert verify_run(run) == []


def test_cut_and_lengthened_files(run):
    chance = random.Random(2)
    for path in named_files(run):
        data = path.read_bytes()
        for size in [0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(CUTS_PER_FILE))]:
            path.write_bytes(data[:size])
            assert verify_run(run), f"{path} cut to {size} bytes"
        path.write_bytes(data + b"\n")
        assert verify_run(run), f"{path} lengthened"
        path.write_bytes(data)
    assert verify_run(run) == []
