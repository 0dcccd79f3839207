"""Whoever applies the changes of a watch in order has what the cluster has, whatever the watch missed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from argusrl.cluster.kube import _differences

Object = dict[str, Any]


def listing(found: dict[str, tuple[int, int]]) -> list[Object]:
    """Objects by name, each with which life (uid) and which version."""
    return [
        {"metadata": {"name": name, "namespace": "a", "uid": str(life), "resourceVersion": f"{life}.{version}"}}
        for name, (life, version) in found.items()
    ]


lists = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5).map(
    listing
)


@given(st.lists(lists, max_size=5))
def test_differences_between_lists_lead_from_one_to_the_next(history: list[list[Object]]) -> None:
    known: dict[tuple[str, str], Object] = {}
    seen: dict[str, Object] = {}
    for items in history:
        for change in _differences(known, items):
            name = change.object["metadata"]["name"]
            if change.kind == "deleted":
                del seen[name]  # nothing is deleted that was not there
            else:
                assert (change.kind == "added") == (name not in seen)
                seen[name] = change.object
        assert sorted(seen.values(), key=str) == sorted(items, key=str)
        assert list(_differences(known, items)) == []
