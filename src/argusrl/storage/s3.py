"""Copies of published folders in S3: one call in the foreground, or a thread that a run does not wait for.

A copy is named by version and digest, and its manifest comes last: what is there already is not sent again.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.errors import ClusterError, ConfigError, StorageError
from argusrl.storage.digests import sha256_file
from argusrl.storage.manifest import MANIFEST

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{2,62})(?:/(?P<prefix>.*))?")
_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 2.0  # doubled after each failure
_DIGEST = "sha256"  # metadata of an object: of its bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and what keys begin with."""

    bucket: str
    prefix: str = ""

    @classmethod
    def of(cls, url: str) -> Place:
        """Of s3://bucket/prefix. Raises ConfigError."""
        match = _URL.fullmatch(url)
        if match is None:
            raise ConfigError(
                f"{url}: not a place in S3",
                "write s3://bucket/prefix; a bucket's name has 3 to 63 of a-z, 0-9, - and .",
            )
        return cls(match["bucket"], (match["prefix"] or "").strip("/"))

    def __truediv__(self, name: str) -> Place:
        return Place(self.bucket, f"{self.prefix}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def require_boto3() -> None:
    """Raises ClusterError where it is not installed."""
    if importlib.util.find_spec("boto3") is None:
        raise ClusterError("s3:// needs the package boto3", "pip install 'argusrl[cluster]'")


def client() -> Any:
    """An S3 client with the usual credentials of AWS. Raises ClusterError."""
    require_boto3()
    import boto3
    from botocore.config import Config

    config = Config(retries={"max_attempts": 4, "mode": "standard"}, connect_timeout=10, read_timeout=60)
    return boto3.client("s3", config=config)


def copy_folder(s3: Any, folder: Path, to: Place) -> int:
    """Send the files of a folder that are not there with the same digest, its manifest last; bytes sent.

    Raises FileNotFoundError where the folder went away, ClusterError where S3 refuses.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(folder)
    files.sort(key=lambda path: path.name == MANIFEST)
    digests = _digests(folder)
    with _told(to):
        return sum(_copy_file(s3, path, to / path.relative_to(folder).as_posix(), digests) for path in files)


def put_json(s3: Any, record: Mapping[str, Any], to: Place) -> None:
    """Replace one small object. Raises ClusterError."""
    with _told(to):
        body = json.dumps(record, indent=1).encode()
        s3.put_object(Bucket=to.bucket, Key=to.prefix, Body=body, ContentType="application/json")


def _copy_file(s3: Any, path: Path, to: Place, digests: Mapping[Path, str]) -> int:
    from boto3.s3.transfer import TransferConfig
    from botocore.exceptions import ClientError

    digest = digests.get(path) or sha256_file(path)
    try:
        if s3.head_object(Bucket=to.bucket, Key=to.prefix)["Metadata"].get(_DIGEST) == digest:
            return 0
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (403, 404):  # 403: no right to list
            raise
    here = TransferConfig(use_threads=False)  # threads of its own would keep a process from ending while one hangs
    s3.upload_file(str(path), to.bucket, to.prefix, ExtraArgs={"Metadata": {_DIGEST: digest}}, Config=here)
    return path.stat().st_size


def _digests(folder: Path) -> dict[Path, str]:
    """What the manifest says, so that large files are not read twice; nothing for a folder without one."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return {folder / name: entry["sha256"] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@contextmanager
def _told(to: Place) -> Iterator[None]:
    """Turns what boto3 raises into a ClusterError that names the place."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error) as error:
        hint = "check the bucket, its region, and that this role may put and head objects there"
        raise ClusterError(f"cannot copy to {to}: {error}", hint) from error


class BackgroundCopies:
    """Copies folders one after the other on a thread of its own. Nothing here raises; failures are reported."""

    def __init__(self, to: Place, report: Callable[[str, str], None], connect: Callable[[], Any] = client) -> None:
        """`report` gets (kind, message): copied, copy_failed, copy_incomplete."""
        self._to, self._report, self._connect = to, report, connect
        self._waiting: queue.Queue[tuple[Path, str, Mapping[str, Any] | None] | None] = queue.Queue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._under_way = False
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def copy(self, folder: Path, name: str, pointer: Mapping[str, Any] | None = None) -> None:
        """Have a folder copied to <to>/<name>, then `pointer` put into <to>/best.json, if there is one."""
        self._waiting.put((folder, name, pointer))

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._under_way or not self._waiting.empty()

    def close(self, deadline_seconds: float = 120.0) -> None:
        """Wait for what is under way, but not for ever; what fails from now on is not tried again."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            self._ended.set()
            left = self._waiting.qsize()
            self._report("copy_incomplete", f"{self._to}: {left} copies were not sent in {deadline_seconds:.0f} s")

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None and not self._ended.is_set():
            folder, name, pointer = work
            self._under_way = True
            try:
                sent = self._patiently(folder, name, pointer)
            except Exception as error:
                self._report("copy_failed", f"{name}: {getattr(error, 'message', error)}")
                continue
            finally:
                self._under_way = False
            if sent:
                self._report("copied", f"{self._to / name}: {sent:,} bytes")

    def _patiently(self, folder: Path, name: str, pointer: Mapping[str, Any] | None) -> int:
        pauses = [_FIRST_PAUSE_SECONDS * 2**number for number in range(_ATTEMPTS - 1)]
        while True:
            try:
                s3 = self._connect()
                sent = copy_folder(s3, folder, self._to / name)
                if pointer is not None:
                    put_json(s3, pointer, self._to / "best.json")
                return sent
            except (ClusterError, StorageError, OSError):
                if not folder.exists():
                    return 0  # a better one came, and retention took this one
                if not pauses or self._closing.wait(pauses.pop(0)):
                    raise
