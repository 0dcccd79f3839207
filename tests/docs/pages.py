"""The Markdown pages of the project, taken apart: fenced blocks, inline code, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int  # of its first line of text
    language: str
    text: str

    @property
    def where(self) -> str:
        """For test ids and messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The fenced blocks of all pages in these languages; of none given: all."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block(page, line, match[1], match[2]))
    return [block for block in found if not languages or block.language in languages]


def block_with(page: str, mark: str) -> str:
    """The text of the one block of a page that holds `mark`."""
    (found,) = [block.text for block in blocks() if block.page == ROOT / page and mark in block.text]
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> Iterator[str]:
    """What stands in backticks outside of fenced blocks."""
    yield from _INLINE.findall(prose(page))


def links(page: Path) -> Iterator[str]:
    """Targets of the page's links."""
    yield from _LINK.findall(prose(page))


def commands() -> Iterator[tuple[str, str]]:
    """(place, command line) of every shell line in a block."""
    for block in blocks("sh", "bash"):
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            if line.strip() and not line.startswith("#"):
                yield f"{block.where}+{number}", line.partition("  #")[0].strip()
    for page in PAGES:
        for code in inline_code(page):
            if re.match(r"argusrl [a-z]+( |$)", code) and "…" not in code and "|" not in code:
                yield str(page.relative_to(ROOT)), code


def recipe_commands() -> Iterator[tuple[str, str]]:
    """(place, command line) of every `argusrl` line in the comment that a recipe begins with."""
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        head = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
        comment = re.sub(r"^# ?", "", head[0] if head else "", flags=re.MULTILINE).replace("\\\n", " ")
        for line in comment.splitlines():
            if line.strip().startswith("argusrl "):
                yield str(path.relative_to(ROOT)), line.strip()
