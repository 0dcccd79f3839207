"""A tiny random Qwen3-VL, rows for it, and one-rank process groups. Nothing here needs the hub or a shipped model."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from argusrl.policy.selftest import make_random_model

    return make_random_model(tmp_path_factory.mktemp("random-qwen3vl"))


@pytest.fixture(scope="session")
def settings(random_model: Path) -> Any:
    from argusrl.policy.settings import PolicySettings

    return PolicySettings(
        model=str(random_model), device="cpu", dtype="float32", banned_ids=(0, 3, 4, 5, 6), rank=4, alpha=8.0
    )


@pytest.fixture(scope="session")
def base(settings: Any) -> Any:
    """The bare model; tests must not change it."""
    from argusrl.policy.model import load_model

    return load_model(settings, reader=True)


@pytest.fixture(scope="session")
def builder(base: Any, settings: Any) -> Any:
    from argusrl.policy.inputs import InputBuilder

    return InputBuilder(base, settings)


@pytest.fixture(scope="session")
def rows(builder: Any, base: Any) -> list[Any]:
    """Image row, text-only row, two turns with an image each."""
    from argusrl.policy.selftest import sample_rows

    return sample_rows(builder, base.config)


@pytest.fixture(scope="session")
def processes() -> Any:
    """Where ranks start as processes of their own: forked from one that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "argusrl.policy.policy",
            "peft",
            "transformers.models.auto.processing_auto",
            "transformers.models.qwen3_vl.modeling_qwen3_vl",
            "transformers.models.qwen3_vl.processing_qwen3_vl",
        ]
    )
    return context


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    from argusrl.policy import group

    store = group.host_store()
    group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="alone")
    yield
    group.disconnect()


@pytest.fixture
def policy(request: pytest.FixtureRequest, settings: Any) -> Any:
    request.getfixturevalue("one_rank")
    from argusrl.policy.policy import Policy

    return Policy(settings)


@pytest.fixture(scope="session")
def gradients() -> Any:
    """(policy) -> whole gradients by name."""

    def whole(policy: Any) -> dict[str, Any]:
        from argusrl.policy.sharding import gather_full

        return dict(gather_full({name: p.grad for name, p in policy.state.parameters.items()}))

    return whole


@pytest.fixture(scope="session")
def tokens(rows: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(response=sum(len(turn.response_ids) for row in rows for turn in row.turns))
