from __future__ import annotations

import pytest

from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError
from argusrl.training.placement import head_to_keep_free, resolve_layout

BOX = {"CPU": 2.0}
NODES = {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("cluster", "resources", "expected"),
    [
        ({}, BOX, ("cpu", 1, 1)),
        ({"slots": 2}, BOX, ("cpu", 2, 2)),
        ({}, NODES, ("cuda", 8, 8)),
        ({"slots": 4}, NODES, ("cuda", 4, 4)),
        ({"device": "cpu", "slots": 3}, NODES, ("cpu", 3, 3)),
        ({"colocate": False, "slots": 8, "engines": 2}, NODES, ("cuda", 6, 2)),
        ({"colocate": False, "slots": 2, "engines": 1}, BOX, ("cpu", 1, 1)),
    ],
)
def test_what_the_recipe_leaves_open_comes_from_the_resources(cluster, resources, expected):
    layout = resolve_layout(ClusterSection(**cluster), resources)
    assert (layout.device, layout.ranks, layout.engines) == expected


@pytest.mark.parametrize(
    ("cluster", "resources", "message"),
    [
        ({"device": "cuda"}, BOX, "sees no GPU"),
        ({"slots": 9}, NODES, "sees 8 GPUs"),
        ({"colocate": False, "slots": 2, "engines": 2}, BOX, "cannot hold separate ranks"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(cluster, resources, message):
    with pytest.raises(ClusterError, match=message):
        resolve_layout(ClusterSection(**cluster), resources)


def node(name: str, cpus: float, gpus: float = 0.0, *, head: bool = False, alive: bool = True) -> dict:
    mark = {"node:__internal_head__": 1.0} if head else {}
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus, **mark}}


@pytest.mark.parametrize(
    ("nodes", "kept_free"),
    [
        ([node("H", 2, head=True)], None),  # the only one
        ([node("H", 0, head=True)], "H"),  # workers will come
        ([node("H", 0, head=True), node("A", 1)], "H"),
        ([node("H", 8, head=True), node("A", 2)], "H"),  # the others suffice
        ([node("H", 8, head=True), node("A", 1)], None),  # they do not
        ([node("H", 8, head=True), node("A", 2, alive=False)], None),
        ([node("H", 8, head=True), node("A", 1.5), node("B", 1.5)], "H"),  # a bundle does not span nodes
        ([node("A", 2)], None),
    ],
)
def test_the_head_is_kept_free_where_the_other_nodes_suffice(nodes, kept_free):
    assert head_to_keep_free(nodes, [{"CPU": 1.0}] * 2) == kept_free


def test_gpus_count_for_bundles_on_gpus():
    nodes = [node("H", 8, 1, head=True), node("A", 64, 2)]
    assert head_to_keep_free(nodes, [{"CPU": 1.0, "GPU": 1.0}] * 2) == "H"
    assert head_to_keep_free(nodes, [{"CPU": 1.0, "GPU": 1.0}] * 3) is None
