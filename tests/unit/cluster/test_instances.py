from __future__ import annotations

import json
from pathlib import Path

import pytest

from argusrl.cluster.instances import INSTANCES, instance
from argusrl.errors import ConfigError

SHARED = Path(__file__).parents[4] / "shared" / "cluster" / "instances.json"


def test_names_with_and_without_ml() -> None:
    assert instance("ml.g7e.12xlarge") is instance("g7e.12xlarge") is INSTANCES["g7e.12xlarge"]
    assert instance("g7e.12xlarge").hyperpod_name == "ml.g7e.12xlarge"


def test_a_slip_is_told_apart_from_the_unknown() -> None:
    with pytest.raises(ConfigError, match=r"did you mean ml.p5en.48xlarge"):
        instance("ml.p5en.48xlrage")
    with pytest.raises(ConfigError, match=r"known: p4d.24xlarge"):
        instance("toaster")


def test_pods_get_less_than_the_node_has() -> None:
    kind = instance("ml.g7e.12xlarge")
    assert kind.allocatable_bytes == 476 << 30
    assert kind.allocatable_cpus == 44


def test_heads_have_no_gpu_and_workers_know_its_speed() -> None:
    for kind in INSTANCES.values():
        assert (kind.gpu is None) == (kind.gpus == 0) == (kind.gpu_bytes == 0)


@pytest.mark.skipif(not SHARED.is_file(), reason="../shared/cluster/instances.json is not here")
def test_the_table_says_what_ec2_says() -> None:
    types = json.loads(SHARED.read_text())["types"]
    for name, kind in INSTANCES.items():
        facts = types[name]
        assert facts["hyperpod_supported"]
        assert (kind.cpus, kind.memory_bytes) == (facts["vcpu"], facts["mem_gib"] * 2**30)
        assert (kind.gpus, kind.efa) == (facts["gpu_count"] or 0, facts["efa"])
        assert kind.gpu_bytes == int(facts["gpu_mem_gib"] * 2**30)
        assert kind.nvme_bytes == (facts["nvme_gb"] or 0) * 10**9
