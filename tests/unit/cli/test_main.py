from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from argusrl.cli import main
from argusrl.errors import ConfigError, CorruptionError, Interrupted


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make every command line end with `error`."""

    def raise_it(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", raise_it)


@pytest.mark.parametrize("verb", list(main.VERBS))
def test_every_verb_has_its_module_and_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb, "--help"]) == 0
    assert "Usage: argusrl" in capsys.readouterr().out


def test_help_lists_every_verb_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in main.VERBS:
        assert verb in text
    code = (
        "import sys; from argusrl.cli.main import run; assert run(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'datasets', 'pyarrow', 'gymnasium', 'numpy', 'pydantic'}\n"
        "loaded = {name for name in sys.modules if name.startswith('argusrl.cli.')}\n"
        "verbs = loaded - {'argusrl.cli.main', 'argusrl.cli.lazy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); assert not verbs, verbs"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("error", [ConfigError(["a: x", "b: y"]), CorruptionError("bytes differ"), Interrupted("x")])
def test_errors_are_told_on_stderr_with_their_exit_code(
    error: ConfigError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.hint = "do this"
    fail_with(monkeypatch, error)
    assert main.run(["train"]) == error.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    for line in [*error.message.split("\n"), "→ do this"]:
        assert line in captured.err
    assert "Traceback" not in captured.err


def test_an_unexpected_error_is_one_line_with_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    fail_with(monkeypatch, KeyError("no such thing as hunter2"))
    assert main.run(["train", "x.yaml"]) == 1
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    found = re.search(r"traceback: (.*)\)", text)
    assert found is not None
    log = Path(found[1])
    content = log.read_text()
    log.unlink()
    assert "Traceback" in content
    assert "argusrl train x.yaml" in content
    assert "hunter2" not in text + content


def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ConfigError("wrong"))
    assert main.run(["train", "x.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_and_exit_codes_of_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main.run([]) == 130
    fail_with(monkeypatch, SystemExit(6))
    assert main.run([]) == 6


def test_a_misspelt_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["conifg"]) == 2
    assert "config" in capsys.readouterr().err


def test_a_verb_can_leave_with_a_code() -> None:
    app = typer.Typer()

    @app.command()
    def leave() -> None:
        raise typer.Exit(6)

    with pytest.raises(SystemExit) as caught:
        app(args=[])
    assert caught.value.code == 6


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == "argusrl 9.9\n"
