"""Who hears of stalls, faults, budgets and collapses: a webhook, an SNS topic. In threads: nobody waits for them."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from argusrl.cluster.notices import Notice
from argusrl.config.cluster_sections import NotifySection
from argusrl.config.secrets import is_secret_reference, resolve_secret
from argusrl.errors import ArgusError, ClusterError

_MOST_WAITING = 1000  # notices; older ones are dropped where nobody takes them
_TRIES = 5
_BACKOFF_SECONDS = 1.0  # doubles
_TIMEOUT_SECONDS = 10.0
_SUBJECT_CHARACTERS = 100  # SNS takes no more

WINDOW_STEPS = 5
LEAST_GAIN = 0.05
COLLAPSED_WINDOWS = 3


class NotDelivered(Exception):
    """Trying again may help, unless `final`."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def body_of(notice: Notice) -> dict[str, Any]:
    """What a webhook gets, as JSON; Slack-like services show `text`."""
    return {
        "text": f"argusrl {notice.run}: {notice.kind}: {notice.text}",
        "run": notice.run,
        "kind": notice.kind,
        "message": notice.text,
        **notice.values,
    }


@dataclass(frozen=True, slots=True)
class Webhook:
    """POSTs notices as JSON."""

    url: str

    def __call__(self, notice: Notice) -> None:
        """Raises NotDelivered."""
        import httpx

        try:
            answer = httpx.post(self.url, json=body_of(notice), timeout=_TIMEOUT_SECONDS, follow_redirects=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotDelivered(type(error).__name__) from error  # the text of some holds the URL, which may be a secret
        if answer.status_code >= 300:
            final = answer.status_code < 500 and answer.status_code not in (408, 425, 429)
            raise NotDelivered(f"HTTP {answer.status_code}", final=final)


@dataclass(frozen=True, slots=True)
class Topic:
    """Publishes notices to an SNS topic."""

    arn: str
    client: Any  # boto3's client of sns

    def __call__(self, notice: Notice) -> None:
        """Raises NotDelivered."""
        from botocore.exceptions import BotoCoreError, ClientError

        subject = f"argusrl {notice.run}: {notice.kind}".encode("ascii", "replace").decode()[:_SUBJECT_CHARACTERS]
        try:
            self.client.publish(TopicArn=self.arn, Subject=subject, Message=json.dumps(body_of(notice), indent=1))
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise NotDelivered(code, final=code in ("NotFound", "AuthorizationError", "InvalidParameter")) from error
        except BotoCoreError as error:
            raise NotDelivered(type(error).__name__) from error


class Channel:
    """A notifier: takes notices at once, delivers them one after another in a thread of its own."""

    def __init__(
        self,
        deliver: Callable[[Notice], None],
        on_loss: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._deliver, self._on_loss, self._sleep = deliver, on_loss, sleep
        self._waiting: queue.Queue[Notice | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="argusrl-notify", daemon=True)
        self._thread.start()

    def send(self, notice: Notice) -> None:
        """Take a notice. The oldest one waiting is dropped where there are too many."""
        while True:
            try:
                self._waiting.put_nowait(notice)
            except queue.Full:
                try:
                    self._waiting.get_nowait()
                except queue.Empty:
                    continue
            else:
                return

    def close(self, seconds: float = 30.0) -> None:
        """Deliver what is waiting, for so long at most."""
        self._waiting.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (notice := self._waiting.get()) is not None:
            for attempt in range(_TRIES):
                try:
                    self._deliver(notice)
                except NotDelivered as error:
                    if error.final or attempt == _TRIES - 1:
                        self._on_loss(f"{notice.kind} of {notice.run} was not delivered: {error}")
                        break
                    self._sleep(_BACKOFF_SECONDS * 2**attempt)
                else:
                    break


def channels(section: NotifySection, on_loss: Callable[[str], None]) -> list[Channel]:
    """The channels that a recipe names. `on_loss` hears of one that cannot be opened, and of what is not delivered."""
    wanted: list[tuple[str, Callable[[str], Callable[[Notice], None]]]] = []
    if section.webhook:
        wanted.append((section.webhook, _webhook))
    if section.sns_topic:
        wanted.append((section.sns_topic, _topic))
    found: list[Channel] = []
    for where, opened in wanted:
        try:
            found.append(Channel(opened(where), on_loss))
        except ArgusError as error:
            on_loss(f"nobody is told: {error.message}")
    return found


def _webhook(url: str) -> Webhook:
    return Webhook(resolve_secret(url) if is_secret_reference(url) else url)


def _topic(arn: str) -> Topic:
    """Raises ClusterError."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ClusterError("the boto3 package is missing", "pip install 'argusrl[cluster]'") from error
    parts = arn.split(":")  # arn:aws:sns:REGION:ACCOUNT:NAME
    try:
        return Topic(arn, boto3.client("sns", region_name=parts[3] if len(parts) > 3 else None))
    except (BotoCoreError, ValueError) as error:
        raise ClusterError(f"no client for SNS topic {arn}: {error}", "arn:aws:sns:REGION:ACCOUNT:NAME") from error


def reward_collapse(rows: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """Whether the mean reward collapsed: the step of its best, and a sentence; None where it did not.

    Means over 5 steps are compared. A run has collapsed when it lost more than half of what it had gained (at least
    0.05) over its first five steps, three windows in a row.
    """
    means = [(int(row["step"]), row.get("reward/mean")) for row in rows if "step" in row]
    rewards = [(step, float(value)) for step, value in means if isinstance(value, int | float)]
    if len(rewards) < WINDOW_STEPS + COLLAPSED_WINDOWS:
        return None
    windows = [
        (rewards[end - 1][0], sum(value for _, value in rewards[end - WINDOW_STEPS : end]) / WINDOW_STEPS)
        for end in range(WINDOW_STEPS, len(rewards) + 1)
    ]
    first = windows[0][1]
    best_step, best = max(windows[:-COLLAPSED_WINDOWS], key=lambda window: window[1])
    gain, now = best - first, windows[-1][1]
    lost = [best - value for _, value in windows[-COLLAPSED_WINDOWS:]]
    if gain < LEAST_GAIN or min(lost) <= gain / 2:
        return None
    return best_step, f"mean reward over {WINDOW_STEPS} steps fell from {best:.3f} (step {best_step}) to {now:.3f}"
