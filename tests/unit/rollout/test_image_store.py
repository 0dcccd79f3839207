from __future__ import annotations

import hashlib

import pytest

from argusrl.errors import EngineError
from argusrl.rollout.engine import EngineImage
from argusrl.rollout.image_store import ImageStore


def image(data: bytes, *, sent: bool = True) -> EngineImage:
    return EngineImage(sha256=hashlib.sha256(data).hexdigest(), data=data if sent else None)


def test_an_image_sent_once_is_known_afterwards() -> None:
    store = ImageStore(100)
    assert store.data(image(b"one")) == b"one"
    assert store.data(image(b"one", sent=False)) == b"one"


def test_an_image_never_sent_is_named() -> None:
    with pytest.raises(EngineError, match=r"^unknown image " + image(b"one").sha256):
        ImageStore(100).data(image(b"one", sent=False))


def test_the_image_used_longest_ago_goes_first() -> None:
    store = ImageStore(10)
    store.data(image(b"aaaa"))
    store.data(image(b"bbbb"))
    store.data(image(b"aaaa", sent=False))
    store.data(image(b"cccc"))
    assert store.data(image(b"aaaa", sent=False)) == b"aaaa"
    with pytest.raises(EngineError):
        store.data(image(b"bbbb", sent=False))


def test_an_image_larger_than_the_store_is_served_and_its_bytes_are_counted_once() -> None:
    store = ImageStore(10)
    large = b"x" * 50
    assert store.data(image(large)) == large
    assert store.data(image(large)) == large
    store.data(image(b"aaaa"))
    store.data(image(b"bbbb"))
    assert store.data(image(b"aaaa", sent=False)) == b"aaaa"


def test_bytes_that_are_no_image_are_refused_by_name() -> None:
    broken = image(b"no image")
    with pytest.raises(EngineError, match=broken.sha256):
        ImageStore(100).open(broken)
