"""What README and docs say is true: commands, recipes, names, links, tables."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import (
    PAGES,
    ROOT,
    Block,
    block_with,
    blocks,
    commands,
    inline_code,
    links,
    prose,
    recipe_commands,
)

from argusrl import errors
from argusrl.cli.lazy import LazyGroup, load_verb
from argusrl.cli.main import VERBS
from argusrl.config.explain import explain
from argusrl.config.load import load_config
from argusrl.config.sections import Config
from argusrl.observe.metrics import metric
from argusrl.storage.layout import RunFolder

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
METRIC_FAMILIES = ("reward", "rollout", "time", "policy", "adapter", "evaluate", "memory")
NOT_KEYS = (".*", ".yaml", ".json", ".py", ".safetensors")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like the top of the project, so that a block can be a file there."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


# ---- recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_sound(recipe: Path) -> None:
    assert load_config(recipe).config.run.name == recipe.stem


@pytest.mark.parametrize("block", blocks("yaml", "yml"), ids=lambda block: block.where)
def test_yaml_blocks_are_sound_recipes(block: Block, clone: Path) -> None:
    first, _, _ = block.text.partition("\n")
    assert first == "# recipe", f"{block.where}: a YAML block is a whole recipe and begins with the line '# recipe'"
    (clone / "block.yaml").write_text(block.text)
    config = load_config(clone / "block.yaml").config
    for function in filter(None, [config.data.generator, config.environment.factory]):
        assert _is_there(function), f"{block.where}: {function}"
    for reward in config.rewards:
        assert reward.function is None or _is_there(reward.function), f"{block.where}: {reward.function}"


def _is_there(function: str) -> bool:
    origin, _, name = function.rpartition(":")
    if not origin.endswith(".py"):
        return importlib.util.find_spec(origin) is not None
    pattern = rf"^(?:async )?(?:def|class) {name}\b"
    return Path(origin).is_file() and re.search(pattern, Path(origin).read_text(), re.MULTILINE) is not None


# ---- commands


@pytest.mark.parametrize(("place", "line"), [*commands(), *recipe_commands()], ids=lambda value: value[:60])
def test_commands_exist(place: str, line: str) -> None:
    words = shlex.split(line)
    if words[0] == "argusrl":
        _parse(words[1:], place)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(wanted) <= set(targets), place
    else:
        assert words[0] in (".venv/bin/python", "python"), f"{place}: what is {words[0]}?"
        files = [word for word in words[1:] if word.endswith(".py") or word.startswith("tests")]
        assert files
        assert all((ROOT / file).exists() for file in files), place


def _parse(words: list[str], place: str) -> None:
    """Parse a command line as `argusrl` would, and check the overrides of a recipe it names."""
    if words[0].startswith("--"):
        assert words in (["--help"], ["--version"]), place
        return
    assert words[0] in VERBS, f"{place}: there is no verb {words[0]}"
    command: Any = load_verb(VERBS, words[0])
    rest = words[1:]
    while hasattr(command, "commands"):
        if not rest:
            return  # a group is named, e.g. `argusrl runs`
        assert rest[0] in command.commands, f"{place}: argusrl {words[0]} has no {rest[0]}"
        lazy = isinstance(command, LazyGroup)
        command = load_verb(command.verbs, rest[0]) if lazy else command.commands[rest[0]]
        rest = rest[1:]
    if not rest and command.params:
        return  # a verb is named in a sentence
    context = command.make_context(command.name, rest)
    recipe, overrides = context.params.get("recipe"), context.params.get("overrides") or []
    if recipe is not None and (ROOT / recipe).is_file() and words[0] != "rewards":
        load_config(ROOT / recipe, overrides)


def test_every_verb_is_written_about() -> None:
    text = "\n".join(line for _, line in commands()) + (ROOT / "CHANGELOG.md").read_text()
    assert [verb for verb in VERBS if f"argusrl {verb}" not in text and f"`{verb}" not in text] == []


# ---- names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_prose_are_real(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(r"(?:src|tests|recipes|examples|scripts|docs|models|benchmarks)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{page.name}: there is no {code}"
        family, slash, rest = code.partition("/")
        if slash and family in METRIC_FAMILIES and re.fullmatch(r"[\w/<>]+", rest):
            metric(code.replace("<name>", "exact"))
        section, dot, _ = code.partition(".")
        dotted = re.fullmatch(r"[a-z_]+(?:\.(?:[a-z_]+|\d+|\*))+", code)
        if dot and dotted and section in Config.model_fields and not code.endswith(NOT_KEYS):
            explain(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name}: {target}"
        assert linked.is_relative_to(ROOT), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", prose(linked), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    texts = set()
    for path in (ROOT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts |= set(vars(errors))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            for fragment in filter(None, (part.strip(" ,.:'") for part in message.split("…"))):
                assert any(fragment in text for text in texts), f"no code says {fragment!r}"


# ---- tables and pictures


def test_written_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "scripts" / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, page in script.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"docs/{name}: run scripts/write_reference.py"


def test_the_table_of_exit_codes_is_that_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "exit_codes.md").read_text(), re.MULTILINE)
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    own = {value.__name__: vars(value)["exit_code"] for value in classes if "exit_code" in vars(value)}
    assert {name: int(code) for code, name in rows} == own
    for inherited in {value.__name__ for value in classes} - set(own):
        assert f"`{inherited}`" in (ROOT / "docs" / "exit_codes.md").read_text()


def test_the_layers_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (enforced,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    drawn = block_with("docs/architecture.md", "algorithms | environments").splitlines()
    assert drawn == [layer.strip("()") for layer in enforced]


def test_the_source_tree_is_that_of_the_readme() -> None:
    drawn = re.findall(r"^  (\w+)/ ", block_with("README.md", "src/argusrl/\n"), re.MULTILINE)
    real = [path.name for path in (ROOT / "src" / "argusrl").iterdir() if (path / "__init__.py").is_file()]
    assert sorted(drawn) == sorted(real)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_entry_of_a_run_folder_is_described(page: str) -> None:
    text = (ROOT / page).read_text()
    properties = [name for name, value in vars(RunFolder).items() if isinstance(value, property) and name != "name"]
    run = RunFolder(Path("/run"))
    paths = [getattr(run, name) for name in properties] + [run.trajectories(0).parent, run.images(0).parent]
    assert [path.name for path in paths if path.name not in text] == []


def test_decisions_are_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = [path.name for path in sorted(folder.glob("0*.md"))]
    assert re.findall(r"\((\d{4}[\w-]+\.md)\)", (folder / "README.md").read_text()) == pages
    for number, name in enumerate(pages, 1):
        text = (folder / name).read_text()
        assert text.startswith(f"# {number}. ")
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences")), name


def test_the_driver_imports_no_torch() -> None:
    code = (
        "import sys, argusrl.training.driver, argusrl.training.trainer\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
