from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planned import QUICKSTART, mazes

from argusrl.cluster.plan import machine
from argusrl.cluster.plan.machine import gpu_named, local_gpus, machine_of
from argusrl.config.load import load_config
from argusrl.config.sections import Config
from argusrl.errors import ConfigError


def quickstart(*changes: str) -> Config:
    return load_config(QUICKSTART, changes).config


def test_the_recipe_names_its_nodes() -> None:
    found = machine_of(
        mazes(
            "cluster.kubernetes.workers.instance=ml.g7e.12xlarge",
            "cluster.kubernetes.workers.nodes=4",
            "cluster.kubernetes.workers.memory=100Gi",
            "cluster.kubernetes.head.memory=20Gi",
            "cluster.kubernetes.volume.capacity=2400Gi",
            "cluster.kubernetes.volume.throughput_mb_per_tib=500",
        )
    )
    assert (found.nodes, found.slots, found.node_bytes, found.head_bytes) == (4, 8, 100 << 30, 20 << 30)
    assert found.storage.capacity == 2400 << 30
    assert found.storage.throughput == pytest.approx(2400 / 1024 * 500e6)


def test_the_command_line_wins_over_the_mazes() -> None:
    changes = ("cluster.kubernetes.workers.instance=ml.g7e.12xlarge",)
    found = machine_of(mazes(*changes), instance_name="ml.p5en.48xlarge", nodes=2)
    assert found.slots == 16
    assert found.gpu is not None
    assert found.gpu.name == "H200"


def test_a_head_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="has no GPU"):
        machine_of(mazes(), instance_name="ml.m5.4xlarge")


PODS = tuple(
    f"cluster.kubernetes.workers.{change}"
    for change in ("instance=ml.g6.2xlarge", "nodes=6", "cpus=7", "memory=28Gi", "gpus=1")
)


def test_nodes_of_another_type_are_what_their_pods_ask_for() -> None:
    found = machine_of(mazes(*PODS, "cluster.kubernetes.head.memory=20Gi"), gpu_gib=24)
    assert (found.nodes, found.slots, found.gpu_bytes, found.gpu) == (6, 6, 24 << 30, None)
    assert (found.node_bytes, found.head_bytes, found.separate_head) == (28 << 30, 20 << 30, True)
    assert found.storage.capacity == 4800 << 30
    assert machine_of(mazes(*PODS)).gpu_bytes is None
    assert machine_of(mazes(*PODS[1:]), nodes=2).slots == 2


def test_another_size_of_gpu_changes_nothing_else() -> None:
    changes = ("cluster.kubernetes.workers.instance=ml.g7e.12xlarge", "cluster.kubernetes.workers.nodes=3")
    known, found = machine_of(mazes(*changes)), machine_of(mazes(*changes), gpu_gib=80)
    assert found == replace(known, name=found.name, gpu=None, gpu_bytes=80 << 30)
    assert "80 GiB" in found.name


def test_an_unknown_type_says_what_to_give() -> None:
    for changes, name in ((PODS[:-1], None), (PODS, "ml.g6.4xlarge")):  # pods without GPUs; a type of its own
        with pytest.raises(ConfigError, match="is not known") as caught:
            machine_of(mazes(*changes), instance_name=name)
        assert "--gpu-gib" in caught.value.hint


def test_this_machine_by_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: [])
    found = machine_of(quickstart())
    assert (found.device, found.slots) == ("cpu", 1)
    assert found.node_bytes
    assert found.shared_memory_bytes
    assert found.storage.source.startswith("free in")


def test_this_machine_by_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: [("NVIDIA H200", 143_771 << 20)] * 2)
    found = machine_of(quickstart("cluster.slots=null"))
    assert (found.device, found.slots, found.gpu_bytes) == ("cuda", 2, 143_771 << 20)
    assert found.gpu is not None
    assert found.gpu.name == "H200"
    assert machine_of(quickstart("cluster.device=cpu")).device == "cpu"


def test_the_drivers_own_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert local_gpus() == [("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887 << 20)]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert local_gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert local_gpus() == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H200", "H200"), ("NVIDIA A10G", "A10G"), ("NVIDIA L4", "L4"), ("NVIDIA A100-SXM4-40GB", "A100 40GB")],
)
def test_gpus_are_known_by_name(name: str, kind: str) -> None:
    found = gpu_named(name)
    assert found is not None
    assert found.name == kind
    assert gpu_named("NVIDIA GeForce RTX 3060") is None
