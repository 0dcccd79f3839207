"""The rules of the house that a machine can check. Guides are 400 and 60 lines; these are the fences."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from argusrl import errors
from argusrl.cli.cluster import VERBS as CLUSTER_VERBS
from argusrl.cli.main import VERBS
from argusrl.config.explain import keys

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "argusrl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_FILE_LINES, MOST_FUNCTION_LINES = 420, 80
VAGUE = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}
WRITTEN = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".json", ".cfg")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def definitions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def our_files() -> list[Path]:
    """Everything that is or would be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_files_are_short() -> None:
    long = {name(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > MOST_FILE_LINES}
    assert long == {}


def test_functions_are_short() -> None:
    long = {
        f"{name(path)}:{node.lineno} {node.name}": lines
        for path in SOURCES
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
    }
    assert long == {}


def test_names_say_what_a_thing_is() -> None:
    files = [name(path) for path in SOURCES if set(path.stem.lower().split("_")) & VAGUE]
    classes = [
        f"{name(path)} {node.name}"
        for path in SOURCES
        for node in definitions(path)
        if isinstance(node, ast.ClassDef) and {word.lower() for word in re.findall(r"[A-Z][a-z]+", node.name)} & VAGUE
    ]
    assert files + classes == []


def test_no_unfinished_marks() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    assert [name(path) for path in [*SOURCES, *TESTS] if marks.search(path.read_text())] == []


def test_every_module_says_what_it_is_for() -> None:
    written = [path for path in SOURCES if path.read_text().strip()]
    silent = [name(path) for path in written if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their bare name."""
    counts = Counter(path.name for path in TESTS if path.name.startswith("test_"))
    assert [file for file, count in counts.items() if count > 1] == []


def test_the_drawn_error_tree_is_the_real_one() -> None:
    names = "AdapterRefused|WorkerLost|NodesMissing|StorageUnusable|Interrupted"
    words = set(re.findall(rf"\b(?:\w+Error|{names})\b", errors.__doc__ or ""))
    real = {
        value.__name__
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ArgusError)
    }
    assert words == real


def test_every_exit_code_is_drawn() -> None:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.ArgusError) and "exit_code" in vars(value):
            assert re.search(rf"\b{value.__name__} +{value.exit_code}\b", errors.__doc__ or ""), value.__name__


def test_every_key_of_a_recipe_is_explained() -> None:
    assert [key.path for key in keys() if not key.help.strip()] == []


@pytest.mark.parametrize(
    "module", ["argusrl.cli.main", "argusrl.config.load", "argusrl.journal.commits", "argusrl.observe.sinks"]
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'datasets', 'pyarrow', 'gymnasium', 'peft'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vllm_is_imported_where_vllm_runs_and_nowhere_else() -> None:
    allowed = {"vllm_engine.py", "sampling_noise.py", "worker_extension.py", "merging.py", "versions.py"}
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(imported.split(".")[0] == "vllm" for imported in names):
                found.add(path.name)
    assert found <= allowed


def test_every_verb_is_a_file_of_the_cli() -> None:
    for module, _ in [*VERBS.values(), *CLUSTER_VERBS.values()]:
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        assert file.is_file() or (file.with_suffix("") / "__init__.py").is_file(), module


def test_no_path_of_somebodys_machine() -> None:
    private = re.compile(r"(?<![\w.])/(?:work/|home/\w+|root/|Users/\w+|opt/wheels)")
    found = []
    for path in our_files():
        if path.suffix in WRITTEN and path != Path(__file__):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if private.search(line):
                    found.append(f"{name(path)}:{number}")
    assert found == []


def test_the_lock_names_no_package_host() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text
        assert "--index-url" not in text.replace("--no-emit-index-url", "")
        assert "--find-links" not in text
