"""Proves on real prompts that the rewards tell right from wrong, before a GPU-hour is paid for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from argusrl.config.patterns import HOLE, fitted_text
from argusrl.config.sections import RewardSection
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rewards.combined import RewardSet
from argusrl.types import Prompt

FULL_SCORE_KINDS = ("exact", "choice", "number", "math", "format")  # 1.0 is right; others have scales of their own


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """What three replies to one prompt are paid: the gold answer, nothing, and a wrong answer."""

    prompt_id: str
    gold_reply: str = ""
    gold: float | None = None  # weighted sums
    empty: float | None = None
    wrong: float | None = None
    replies: int = 0  # how many were scored
    problems: dict[str, str] = field(default_factory=dict)  # by "reward", "gold", "empty", "wrong"; none: all is well


async def check_rewards(
    rewards: RewardSet, sections: Sequence[RewardSection], prompts: Sequence[Prompt]
) -> list[RewardCheck]:
    """Score a gold, an empty and a wrong reply for every prompt; a failing reward is a problem, not an error.

    The gold reply is the best paid of several that put the answer where the rewards look for it: in <answer>…</answer>,
    in \\boxed{…}, bare, and as the recipe's patterns have it.
    """
    return [await _check(rewards, sections, prompt) for prompt in prompts]


async def _check(rewards: RewardSet, sections: Sequence[RewardSection], prompt: Prompt) -> RewardCheck:
    if prompt.answer is None:
        return RewardCheck(prompt.id, problems={"gold": "the row has no answer to try"})
    several = isinstance(prompt.answer, (list, tuple))
    answers = [str(answer) for answer in (prompt.answer if several else [prompt.answer])]
    if not answers:
        return RewardCheck(prompt.id, problems={"gold": "the list of answers is empty"})
    right, wrong = answers[0], wrong_answer(answers)
    forms = list(reply_forms(sections))
    try:
        paid = [await rewards.score(_item(prompt, form.replace(HOLE, right))) for form in forms]
        best = max(range(len(forms)), key=lambda index: paid[index][0])
        (gold, scores), form = paid[best], forms[best]
        empty, _ = await rewards.score(_item(prompt, ""))
        wrongly, _ = await rewards.score(_item(prompt, form.replace(HOLE, wrong)))
    except RewardFailed as failed:
        return RewardCheck(prompt.id, problems={"reward": f"'{failed.source}' failed: {failed.message}"})
    reply = form.replace(HOLE, right)
    problems: dict[str, str] = {}
    for section in sections:
        name = section.name or section.kind
        if section.kind in FULL_SCORE_KINDS and section.weight > 0 and scores[name] < 1.0:
            problems["gold"] = f"{reply!r:.200} holds the gold answer, but reward '{name}' gives {scores[name]:g}"
    if empty >= gold:
        problems["empty"] = f"an empty reply is paid {empty:g}, no less than the gold answer ({gold:g})"
    if wrongly >= gold:
        wrong_reply = form.replace(HOLE, wrong)
        problems["wrong"] = f"{wrong_reply!r:.200} is wrong, but paid {wrongly:g}; the gold answer {gold:g}"
    return RewardCheck(prompt.id, reply, gold, empty, wrongly, len(forms) + 2, problems)


def _item(prompt: Prompt, reply: str) -> Scorable:
    text = "\n".join(part for message in prompt.messages for part in message.content if isinstance(part, str))
    return Scorable(reply=reply, replies=(reply,), prompt=text, answer=prompt.answer, info=prompt.info)


def wrong_answer(right: Sequence[str]) -> str:
    """An answer of the same kind as the first right one that is none of them."""
    first = right[0].strip()
    candidates = ["surely nothing of that kind"]
    if re.fullmatch(r"[(\[]?[A-Za-z][)\]]?[.:]?", first):
        candidates = list("ABCDEFGH")
    elif re.fullmatch(r"-?\d+(\.\d+)?", first.replace(",", "")):
        candidates = [str(int(float(first.replace(",", ""))) + more) for more in range(1, len(right) + 2)]
    taken = {re.sub(r"[\W_]", "", answer).upper() for answer in right}
    return next(candidate for candidate in candidates if candidate.upper() not in taken)


def reply_forms(sections: Sequence[RewardSection]) -> Iterator[str]:
    """Replies with \\0 where the answer goes; those fitted to the patterns of the rewards come first."""
    for section in sections:
        if section.pattern is not None:
            fitted = fitted_text(section.pattern)
            yield from () if fitted is None else (fitted,)
    yield from ("<answer>\0</answer>", "<think>so</think><answer>\0</answer>", "\\boxed{\0}", "\0")
