"""User rewards that go wrong in every way."""

import asyncio
import os
import time
from pathlib import Path


def length(reply, scale=1.0):
    return len(reply) * scale


def sees_all(**everything):
    return float(len(everything))


def by_turns(replies, info, environment_reward, terminated):
    return len(replies) + info["bonus"] + environment_reward + terminated


async def waits(reply):
    await asyncio.sleep(0)
    return len(reply)


def raises(reply):
    raise ValueError(f"cannot read {reply}")


def raises_once(info):
    marker = Path(info["marker"])
    if not marker.exists():
        marker.touch()
        raise ValueError("only once")
    return 1.0


def hangs(reply):
    while reply == "hang":
        time.sleep(60)
    return 1.0


def ends():
    os._exit(3)


def forks():
    os.fork()
    return 2.0


def answers(info):
    return info["value"]


def needs_more(reply, rubric):
    return len(reply) + len(rubric)
