"""Write docs/configuration.md, docs/metrics.md and docs/controller.md from the declarations in the code.

    python scripts/write_reference.py            # write both
    python scripts/write_reference.py --check    # exit code 1 if one of them is out of date

The text of a key is the docstring under its field in config/sections.py; of a metric, its line in observe/metrics.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

from argusrl.cluster.decide import TABLE, table_rows
from argusrl.config.explain import KeyHelp, keys
from argusrl.config.load import MAY_CHANGE_ON_RESUME
from argusrl.observe.metrics import METRICS, Metric

DOCS = Path(__file__).parents[1] / "docs"
_WRITTEN = "<!-- Written by scripts/write_reference.py; do not edit. -->"


def configuration() -> str:
    """Markdown: one table per section of a recipe."""
    lines = [
        "# All keys of a recipe",
        "",
        _WRITTEN,
        "",
        "How recipes work is in [recipes.md](recipes.md). The same help in a terminal: `argusrl config explain KEY`.",
        "",
        "A key marked ↻ may change when a run is resumed. `*` in a name stands for a number: `rewards.0.weight`.",
    ]
    section = ""
    for key in keys():
        first, _, _ = key.path.partition(".")
        if first != section:
            section = first
            lines += ["", f"## {section}", "", "| key | value | default | meaning |", "|---|---|---|---|"]
        lines.append(_key_row(key))
    return "\n".join([*lines, ""])


def _key_row(key: KeyHelp) -> str:
    mark = " ↻" if any(fnmatch(key.path, pattern) for pattern in MAY_CHANGE_ON_RESUME) else ""
    default = "required" if key.required else f"`{json.dumps(key.default, ensure_ascii=False)}`"
    return f"| `{key.path}`{mark} | {_cell(key.type)} | {_cell(default)} | {_cell(key.help)} |"


def metrics() -> str:
    """Markdown: one table of all metrics."""
    lines = [
        "# All metrics",
        "",
        _WRITTEN,
        "",
        "Each line of `metrics.jsonl` is one step; TensorBoard and the optional sinks get the same rows. Step 0 is the",
        "evaluation before training. A name that is not in this table is refused by the code that writes rows.",
        "A value outside its healthy range is shown as a warning in the panel; it stops nothing.",
        "",
        "| name | unit | meaning | healthy |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_metric_row(metric) for metric in METRICS.values()), ""])


def _metric_row(metric: Metric) -> str:
    unit = "text" if metric.text else metric.unit
    return f"| `{metric.name}` | {unit} | {_cell(metric.meaning)} | {metric.healthy()} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("](", "]\\(")  # in a pattern that is no link


def controller() -> str:
    """Markdown: the decision table of the controller."""
    rows = [f"| `{name}` | {_cell(sees)} | {deed} | {_cell(why)} |" for name, sees, deed, why in table_rows()]
    head = ["| row | what is seen | what is done | why |", "|---|---|---|---|"]
    return "\n".join(
        [
            "# What the controller decides",
            "",
            _WRITTEN,
            "",
            "`argusrl cluster watch` looks at each run every five seconds and does what the first row that holds",
            "says. The run folder counts first, then the head pod and its node, the RayJob's own status last. The rule",
            "is `decide` in `src/argusrl/cluster/decide.py`; `controller.jsonl` of a run names the rows that held.",
            "",
            *head,
            *rows[: len(TABLE)],
            "",
            "Before a resubmission one of these may stand in the way. A lost head, an eviction, a deadline of KubeRay",
            "and a submission by a person are nobody's fault: they never make a run futile.",
            "",
            *head,
            *rows[len(TABLE) :],
            "",
        ]
    )


PAGES = {"configuration.md": configuration, "controller.md": controller, "metrics.md": metrics}


def main() -> int:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [name for name, page in PAGES.items() if _read(DOCS / name) != page()]
    for name in stale:
        if not check:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/{name} {'is out of date: run scripts/write_reference.py' if check else 'written'}")
    return 1 if check and stale else 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
