"""Before ranks form a group each has a bundle on a living node: on its own, on another one, or it stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from argusrl.errors import NodesMissing
from argusrl.training.bring_up import Hiring
from argusrl.training.fleet import Member
from argusrl.training.left_behind import LeftBehind
from argusrl.training.nodes import Nodes

if TYPE_CHECKING:
    from argusrl.training.run import Run


async def seat_ranks(run: Run, hiring: Hiring, nodes: Nodes, absent: LeftBehind) -> None:
    """Ranks without a node stay behind where the recipe allows fewer, else one is waited for. Raises NodesMissing.

    Ranks whose bundle has moved are begun anew.
    """
    ranks, fewest, layout = run.workers.ranks, run.config.recovery.min_ranks, hiring.placement.layout
    bundles = {member.place: layout.bundle("rank", member.place) for member in ranks.members}
    homes = await nodes.have(bundles.values())
    missing = [member for member in ranks.members if bundles[member.place] not in homes]
    rest = [member for member in ranks.members if bundles[member.place] in homes]
    if missing and fewest is not None and len(rest) >= fewest:
        for member in missing:
            absent.leave(member)
        ranks.members = rest
        text = f"going on with {len(rest)} of {len(rest) + len(absent)} ranks until a node is added"
        run.say("smaller", text, warning=True, ranks=len(rest), missing=len(absent))
    elif missing:
        homes = await _await_nodes(run, nodes, missing, bundles.values())
    for number, member in enumerate(ranks.members):
        node = homes[bundles[member.place]]
        if nodes.where.get(("rank", member.place)) != node:
            ranks.replace(number)
            nodes.where["rank", member.place] = node


async def _await_nodes(run: Run, nodes: Nodes, missing: Sequence[Member], bundles: Iterable[int]) -> dict[int, str]:
    seconds = run.config.recovery.node_wait_seconds
    names = ", ".join(f"rank {member.place}" for member in missing)
    until = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time.time() + seconds))
    run.phase("wait")
    run.say(
        "waiting",
        f"{names}: the node is lost; waiting for another one until {until} (recovery.node_wait_seconds)",
        warning=True,
        seconds=seconds,
        ranks=[member.place for member in missing],
    )
    homes = await nodes.have(bundles, seconds)
    if not homes.keys() >= set(bundles):
        raise NodesMissing(
            f"no node came for {names} within {seconds:.0f} s (recovery.node_wait_seconds)",
            "add a node and run the same command, or set recovery.min_ranks to go on with fewer ranks",
        )
    return homes
