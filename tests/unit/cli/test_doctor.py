from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from argusrl.cli import doctor
from argusrl.cli.main import run
from argusrl.config.checks import LORA_RANKS_SERVED

SLOW = ("check_torch", "check_vllm", "check_packing")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor without the checks that import heavy packages."""
    for name in SLOW:
        monkeypatch.setattr(doctor, name, lambda: [])


def vllm_answers(monkeypatch: pytest.MonkeyPatch, code: int, out: str, error: str = "") -> None:
    answer = subprocess.CompletedProcess([], code, stdout=out, stderr=error)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)


@pytest.mark.usefixtures("fast")
def test_every_line_is_told_and_the_probe_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--root", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    for name in ("python", "cores", "memory", "open files", "run root", "file system", "disk", "wandb", "mlflow"):
        assert name in names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fast")
def test_an_unusable_root_is_a_cross_with_the_fix_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run(["doctor", "--root", str(file / "runs")]) == 1
    lines = capsys.readouterr().out.splitlines()
    position = next(number for number, line in enumerate(lines) if line.startswith("✗ run root"))
    assert lines[position + 1].strip().startswith("→")


def test_a_check_that_breaks_is_a_cross_and_the_others_go_on() -> None:
    def check_broken() -> list[doctor.Check]:
        raise RuntimeError("boom")

    (found,) = doctor._guarded(check_broken)
    assert not found.ok
    assert found.name == "broken"
    assert "boom" in found.detail
    assert found.fix


def test_vllm_that_does_not_import_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_answers(monkeypatch, 1, "", "Traceback\nImportError: libcuda.so.1")
    (found,) = doctor.check_vllm()
    assert not found.ok
    assert "libcuda.so.1" in found.detail


def test_vllm_with_other_lora_ranks_than_ours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, Any] = {"version": "0.32.0", "device": "cpu", "ranks": LORA_RANKS_SERVED}
    vllm_answers(monkeypatch, 0, "INFO noise\n" + json.dumps(answer))
    assert [check.ok for check in doctor.check_vllm()] == [True, True]
    vllm_answers(monkeypatch, 0, json.dumps({**answer, "ranks": [1, 8]}))
    assert [check.ok for check in doctor.check_vllm()] == [True, False]


def test_packing_is_judged_by_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("argusrl.policy.selftest")
    monkeypatch.setitem(sys.modules, "argusrl.policy.selftest", module)
    assert not doctor.check_packing()[0].ok  # nothing to import
    for passed in (True, False):
        answer = {"max_logit_error": 3e-6, "limit": 1e-5, "passed": passed}
        module.packing_parity = lambda answer=answer: answer  # type: ignore[attr-defined]
        assert doctor.check_packing()[0].ok is passed
