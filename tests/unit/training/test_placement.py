from __future__ import annotations

import pytest

from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError
from argusrl.training.placement import resolve_layout

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
