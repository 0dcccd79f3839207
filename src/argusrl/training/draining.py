"""Nodes that somebody wants emptied are left in good order before they go: a planned loss, which is no fault.

A wish in the run folder (journal/drains.py) names a pod. From then on its node gets no new work. The rollout under way
is sealed with the tokens of its unfinished replies; updates under way may end. Then everything on the node ends, the
wish is answered, and Ray on the node ends, too, so that its bundles move to a spare node at once. The run goes on as
after the loss of a node: on a spare, with fewer ranks, or waiting. What has not ended by the deadline is abandoned: the
last commit and the journal are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.core.generated import autoscaler_pb2

from argusrl.errors import ArgusError, StorageError, WorkerError
from argusrl.journal.drains import Drain, Drained, answer_drain, asked_pods, read_drain
from argusrl.recovery.decide import Decision
from argusrl.training.calls import settle
from argusrl.training.fleet import kill
from argusrl.training.probing import Probes

if TYPE_CHECKING:
    from argusrl.training.healing import Healing

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 8.0  # for a probe that has not told its pod yet
_MARGIN_SECONDS = 3.0  # before the deadline: who asked waits no longer than that
_GONE_SECONDS = 5.0  # Ray on a node needs a moment to end
_COUNT_SECONDS = 2.0
_ENDING_SECONDS = 2.0  # that the end of everything on the node takes


class NodeLeaving(WorkerError):
    """What was under way was ended in good order, because a node has to be left."""


@dataclass(slots=True)
class _Wish:
    drain: Drain
    seen: float  # monotonic
    node: str = ""  # Ray node
    answered: bool = False
    gone: bool = False  # everything on the node has been ended
    handed_over: int = 0
    deadline: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Draining:
    """Wishes that this driver has seen, by pod."""

    healing: Healing
    probes: Probes
    wishes: dict[str, _Wish] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Begin to look for wishes."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self, *, sealed: bool) -> None:
        """The driver ends. Where everything is `sealed`, every node may go: that is the answer to all wishes."""
        tasks = [self._task, *self._tasks] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for wish in self.wishes.values():
            if sealed:
                await self._answer(wish, "drained")

    # ---- looking

    async def _watch(self) -> None:
        while True:
            try:
                for pod, answered in (await asyncio.to_thread(asked_pods, self.healing.run.folder)).items():
                    await self._see(pod, answered)
            except StorageError as away:
                logging.info("drains: %s", away.message)
            except Exception:  # whatever is wrong with a wish is no fault of the run
                logging.exception("looking for drains failed")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _see(self, pod: str, answered: bool) -> None:
        if answered and self.probes.known(pod) == self._own_node():
            return  # a driver before this one was asked to go, and went
        if pod in self.wishes:
            node = self.probes.known(pod)
            if node and node != self.wishes[pod].node and self.wishes[pod].answered:
                self._begin(pod, self.wishes[pod].drain, node, answered=True)  # it came back in the same pod
            return
        node = (self.probes.known(pod) or "") if answered else ""
        if node or not answered:  # an answer of a driver before this one stands, but the node is not used
            drain = await asyncio.to_thread(read_drain, self.healing.run.folder, pod)
            self._begin(pod, drain, node, answered=answered)

    def _begin(self, pod: str, drain: Drain, node: str, *, answered: bool) -> None:
        wish = self.wishes[pod] = _Wish(drain, time.monotonic(), node, answered)
        task = asyncio.create_task(self._take(wish))
        self._tasks.add(task)
        task.add_done_callback(self._taken)

    def _taken(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            logging.error("a drain failed: %s: %s", type(fault).__name__, fault)

    async def _take(self, wish: _Wish) -> None:
        """From the moment a wish is seen: no new work there, and the end of what is there by the deadline."""
        run, drain = self.healing.run, wish.drain
        node = wish.node or await self.probes.node_of(drain.pod, _PATIENCE_SECONDS)
        if node is None:
            await self._answer(wish, "nothing there")
            return
        wish.node = node
        text = f"{drain.pod} is to be left ({drain.asked_by}: {drain.reason})"
        run.say("draining", text, warning=True, pod=drain.pod, node=drain.node, asked_by=drain.asked_by)
        if node == self._own_node():
            run.stop.set()  # the driver's own: everything is sealed, and the run ends in good order
            return
        self.healing.nodes.leave(node)
        self.healing.judged_nodes[node] = Decision("recover", f"{drain.pod} was left on purpose")
        await asyncio.to_thread(_drain_in_ray, node, drain)
        if not self._in_use(node):
            await self._end(wish, "drained")
            return
        run.leaving.set()
        await asyncio.sleep(max(0.0, wish.seen + drain.deadline_seconds - _MARGIN_SECONDS - time.monotonic()))
        await self._end(wish, "abandoned")

    # ---- leaving

    async def count(self) -> None:
        """How many trajectories are unfinished, before they are handed over; for the answer."""
        wishes = [wish for wish in self.wishes.values() if wish.node and not wish.answered]
        episodes = self.healing.run.workers.episodes
        epoch = self.healing.run.epoch.number
        references = [member.actor.unfinished_samples.remote(epoch) for member in episodes.members if not member.fresh]
        names = ["episode worker"] * len(references)
        answers = await settle(references, _COUNT_SECONDS, "unfinished_samples", names)
        for wish in wishes:
            wish.handed_over = sum(answer for answer in answers if not isinstance(answer, ArgusError))

    async def in_time(self, work: Coroutine[Any, Any, None]) -> None:
        """Await something that is good to have, as long as there is time for it."""
        ends = [wish.seen + wish.drain.deadline_seconds for wish in self.wishes.values() if not wish.answered]
        left = min(ends, default=0.0) - _MARGIN_SECONDS - _ENDING_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                await work
        except (ArgusError, TimeoutError) as fault:
            logging.warning("before the node is left: %s", getattr(fault, "message", "there was no time left"))

    async def empty(self) -> None:
        """The journal is sealed, or lost already: everything on the nodes that are left ends, and they go."""
        self.healing.run.leaving.clear()
        leaving = [wish for wish in self.wishes.values() if self.healing.nodes.is_left(wish.node)]
        for wish in leaving:
            await self._end(wish, "drained")
        await asyncio.gather(*(self.healing.nodes.gone(wish.node, _GONE_SECONDS) for wish in leaving))

    async def _end(self, wish: _Wish, outcome: str) -> None:
        """End what is on a node, answer, and let the node go; once."""
        if wish.gone:
            return
        wish.gone = True
        self._release(wish.node)
        await self._answer(wish, outcome)
        await self.probes.keep_logs_of(wish.node)
        await self.probes.leave(wish.node)

    def _in_use(self, node: str) -> bool:
        return node in self.healing.nodes.where.values()

    def _own_node(self) -> str:
        """The node of the driver."""
        return str(ray.get_runtime_context().get_node_id())

    def _release(self, node: str) -> None:
        """End every worker of the run on a node. Those that have to come back do so elsewhere."""
        healing = self.healing
        workers, where = healing.run.workers, healing.nodes.where
        if where.get(("engine", 0)) == node:  # standbys are beside it
            while healing.hiring.standbys:
                kill(healing.hiring.standbys.pop())
        for number, member in enumerate(workers.engines.members):
            if where.get(("engine", member.place)) == node:
                healing.engines.replace(number)
                kill(member.actor)
        for member in [*workers.ranks.members, *healing.absent.ready.values()]:
            if where.get(("rank", member.place)) == node:
                member.fresh = True  # nobody watches it: its seat is given again before the next group
                kill(member.actor)
        for number, member in enumerate(workers.episodes.members):
            if where.get(("w", member.place)) == node:
                where.pop(("w", member.place))
                workers.episodes.replace(number)

    async def _answer(self, wish: _Wish, outcome: str) -> None:
        if wish.answered:
            return
        wish.answered = True
        run, seconds = self.healing.run, time.monotonic() - wish.seen
        answer = Drained(
            pod=wish.drain.pod,
            outcome=outcome,
            seconds=round(seconds, 3),
            handed_over=wish.handed_over if outcome == "drained" else 0,
            time=time.time(),
        )
        text = f"{answer.pod}: {outcome} after {seconds:.1f} s"
        run.say(
            "drained", text, outcome=outcome, pod=answer.pod, seconds=answer.seconds, handed_over=answer.handed_over
        )
        try:
            await asyncio.to_thread(answer_drain, run.folder, answer)
        except StorageError as away:
            logging.warning("the answer to the drain of %s is not written: %s", answer.pod, away.message)


def _drain_in_ray(node: str, drain: Drain) -> None:
    """Ray places nothing on the node any more. Without that its death is what moves the bundles."""
    deadline = int(1000 * (time.time() + drain.deadline_seconds))
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    try:
        client: Any = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(node, reason, drain.reason, deadline, timeout=_COUNT_SECONDS)
    except Exception as error:  # no public call of Ray's: without it workers are placed by our own table alone
        accepted, refusal = False, f"{type(error).__name__}: {error}"
    if not accepted:
        logging.warning("Ray does not drain node %s: %s", node, refusal)
