"""A reward of one's own: right answers count, and a short reply is worth a little more than a long one.

In a recipe:

    rewards:
      - kind: python
        function: examples/custom_reward.py:brief_and_right
        options: {free_words: 50}

A reward is a function, sync or async, that names what it wants of: reply (the last one), replies (all of them),
prompt, answer, info (other columns of the row), environment_reward, terminated; other parameters come from `options`.
It returns a finite number. It runs in a process of its own that is killed after `timeout_seconds`, so it may hang or
crash without harm to the run; async functions run side by side, which suits calls to a service.
"""

from __future__ import annotations

import re


def brief_and_right(reply: str, answer: str, free_words: int = 50) -> float:
    marked = re.search(r"<answer>(.*?)</answer>", reply, re.DOTALL)
    if marked is None or marked.group(1).strip() != str(answer).strip():
        return 0.0
    surplus = max(0, len(reply.split()) - free_words)
    return 1.0 - 0.5 * min(1.0, surplus / free_words)
