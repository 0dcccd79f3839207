from __future__ import annotations

from datetime import datetime
from pathlib import Path

from argusrl.observe.events import EventLog, read_events
from argusrl.observe.redact import MASK, Redactor


def test_events_keep_their_order_and_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("paused", "the judge does not answer", step=3)
    log.write("resumed", "it answers again", kind_of="x", message_id=4)
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["kind"], first["message"], first["step"]) == ("paused", "the judge does not answer", 3)
    assert second["message_id"] == 4
    assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(second["time"])


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("a", "one")
    with path.open("a") as file:
        file.write('{"kind": "torn')
    EventLog(path).write("b", "two")
    assert [event["kind"] for event in read_events(path)] == ["a", "b"]


def test_secrets_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, Redactor(["hunter2"])).write(
        "failed", "401 for hunter2", headers={"Authorization": "Bearer hunter2"}
    )
    assert "hunter2" not in path.read_text()
    assert read_events(path)[0]["message"] == f"401 for {MASK}"
