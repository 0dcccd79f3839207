"""What a probe reads, with a made-up NVML, and what its readings mean."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from argusrl.cluster import node_probe
from argusrl.cluster.gpu_probe import Gpu, GpuProbe, Xid
from argusrl.cluster.node_findings import NodeHistory, cause_of_xid, measured
from argusrl.cluster.node_probe import NodeProbe, Reading, StorageClock, memory_bytes, space_bytes


class NVMLError_NotFound(Exception):
    pass


class NVMLError_GpuIsLost(Exception):
    pass


class NVMLError_Timeout(Exception):
    pass


class Nvml:
    """As much of pynvml as the probe uses, for GPUs of a test."""

    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40

    def __init__(self, gpus: int) -> None:
        self.celsius, self.ecc, self.reasons = [40] * gpus, [0] * gpus, [0] * gpus
        self.lost: set[int] = set()
        self.events: list[SimpleNamespace] = []
        self.registered: list[int] = []

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.celsius)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:
        if not self.events:
            raise NVMLError_Timeout
        return self.events.pop(0)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def xid(self, gpu: int, number: int) -> None:
        self.events.append(SimpleNamespace(eventType=8, eventData=number, device=gpu))

    def _answer(self, handle: int, value: object) -> object:
        if handle in self.lost:
            raise NVMLError_GpuIsLost
        return value

    def nvmlDeviceGetUUID(self, handle):
        return self._answer(handle, f"GPU-{handle}")

    def nvmlDeviceGetTemperature(self, handle, _):
        return self._answer(handle, self.celsius[handle])

    def nvmlDeviceGetTemperatureThreshold(self, handle, _):
        return self._answer(handle, 88)

    def nvmlDeviceGetTotalEccErrors(self, handle, *_):
        return self._answer(handle, self.ecc[handle])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._answer(handle, self.reasons[handle])


def reading(**changes) -> Reading:
    whole = {"memory_total_bytes": 100, "disk_total_bytes": 100, "shm_total_bytes": 100}
    free = {"memory_free_bytes": 50, "disk_free_bytes": 50, "shm_free_bytes": 50}
    return Reading(**({"time": 1.0, **whole, **free} | changes))


def kinds(findings) -> list[tuple[str, str, int]]:
    return [(one.kind, one.cause, one.count) for one in findings]


def test_gpus_are_read_and_listened_to():
    nvml = Nvml(2)
    probe = GpuProbe.of(nvml)
    assert nvml.registered == [0, 1]
    nvml.celsius[1], nvml.ecc[0], nvml.reasons[1] = 91, 3, 0x40 | 0x1
    first, second = probe.gpus()
    assert (first.uuid, first.uncorrected_ecc, first.throttled) == ("GPU-0", 3, ())
    assert (second.temperature_celsius, second.slowdown_celsius) == (91, 88)
    assert second.throttled == ("hardware thermal slowdown",)
    nvml.xid(1, 79)
    nvml.xid(0, 31)
    assert [(one.gpu, one.number) for one in probe.xids()] == [(1, 79), (0, 31)]
    assert probe.xids() == ()


def test_a_gpu_that_is_lost_is_told_apart_from_one_that_does_not_know(monkeypatch):
    nvml = Nvml(2)
    probe = GpuProbe.of(nvml)
    nvml.lost.add(1)
    monkeypatch.delattr(Nvml, "nvmlDeviceGetTotalEccErrors")
    first, second = probe.gpus()
    assert (first.lost, first.uncorrected_ecc) == (False, None)
    assert second.lost


def test_without_a_driver_there_is_nothing_wrong():
    def missing() -> None:
        raise NVMLError_NotFound

    probe = GpuProbe.of(SimpleNamespace(nvmlInit=missing))
    assert (probe.gpus(), probe.xids(), probe.problem) == ((), (), "")


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [((13, 31), "application"), ((63, 64, 71, 74, 79, 94, 95, 109), "hardware"), ((1, 62), "unknown")],
)
def test_who_is_to_blame_for_an_xid(numbers, cause):
    assert {cause_of_xid(number) for number in numbers} == {cause}


def test_xids_are_counted_by_gpu_and_number():
    history = NodeHistory()
    history.add(reading(xids=(Xid(gpu=0, number=79, time=1.0), Xid(gpu=1, number=79, time=1.0))))
    found = history.add(reading(time=2.0, xids=(Xid(gpu=0, number=79, time=2.0), Xid(gpu=0, number=13, time=2.0))))
    assert sorted((one.text, one.cause, one.count, one.time) for one in found) == [
        ("GPU 0: Xid 13", "application", 1, 2.0),
        ("GPU 0: Xid 79", "hardware", 2, 2.0),
        ("GPU 1: Xid 79", "hardware", 1, 1.0),
    ]


def test_errors_of_memory_count_from_the_first_reading_and_a_lost_gpu_is_missed():
    history = NodeHistory()
    assert history.add(reading(gpus=(Gpu(index=0, uncorrected_ecc=5), Gpu(index=1, uncorrected_ecc=0)))) == []
    found = history.add(reading(gpus=(Gpu(index=0, uncorrected_ecc=7), Gpu(index=1, lost=True))))
    assert kinds(found) == [("ecc", "hardware", 2), ("device_lost", "hardware", 1)]
    found = history.add(reading(time=9.0, gpus=(Gpu(index=0, uncorrected_ecc=8), Gpu(index=1, lost=True))))
    assert kinds(found) == [("ecc", "hardware", 3), ("device_lost", "hardware", 2)]
    assert "1 of 2 GPUs answer" in found[1].text


@pytest.mark.parametrize(
    ("changes", "kind", "cause"),
    [
        ({"memory_free_bytes": 4}, "memory", "resources"),
        ({"disk_free_bytes": 4}, "disk", "resources"),
        ({"shm_free_bytes": 9}, "shm", "resources"),
        ({"storage_seconds": 6.0}, "storage", "storage"),
        ({"storage_seconds": 0.01, "storage_waiting_seconds": 12.0}, "storage", "storage"),
        ({"storage_error": "Stale file handle"}, "storage", "storage"),
        ({"gpus": (Gpu(index=0, temperature_celsius=91.0, slowdown_celsius=88.0),)}, "temperature", "hardware"),
        ({"gpus": (Gpu(index=0, temperature_celsius=70.0, throttled=("power brake",)),)}, "temperature", "hardware"),
    ],
)
def test_every_rule_has_a_reading_that_breaks_it(changes, kind, cause):
    assert kinds(NodeHistory().add(reading(**changes))) == [(kind, cause, 1)]


def test_a_clock_counts_only_beyond_what_is_uncertain():
    assert NodeHistory().add(reading(), clock_offset_seconds=-4.0, uncertain_seconds=3.0) == []
    (found,) = NodeHistory().add(reading(), clock_offset_seconds=-4.0, uncertain_seconds=0.1)
    assert (found.kind, found.text) == ("clock", "its clock is -4.0 s from the driver's")


def test_what_is_over_stays_with_the_time_it_was_seen():
    history = NodeHistory()
    history.add(reading(time=3.0, shm_free_bytes=1))
    (found,) = history.add(reading(time=8.0))
    assert (found.kind, found.time) == ("shm", 3.0)


def test_numbers_of_a_report_have_units():
    gpu = Gpu(index=0, temperature_celsius=61.0, uncorrected_ecc=0)
    values = measured(reading(gpus=(gpu,), storage_seconds=0.004), clock_offset_seconds=0.25)
    assert values["gpu0_temperature_celsius"] == 61.0
    assert values["storage_seconds"] == 0.004
    assert values["clock_offset_seconds"] == 0.25
    assert all(name.endswith(("_bytes", "_seconds", "_celsius", "_ecc")) for name in values)


def test_a_node_is_read_with_the_names_of_its_pod(tmp_path, monkeypatch):
    monkeypatch.setenv("POD_NAME", "pod-1")
    monkeypatch.setenv("NODE_NAME", "hyperpod-i-1")
    probe = NodeProbe(tmp_path, tmp_path, gpus=GpuProbe())
    found = probe.read()
    assert (found.pod, found.node) == ("pod-1", "hyperpod-i-1")
    monkeypatch.delenv("POD_NAME")
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "pod-of-kuberay")
    assert probe.read().pod == "pod-of-kuberay"
    assert 0 < found.memory_free_bytes <= found.memory_total_bytes
    assert 0 < found.disk_free_bytes <= found.disk_total_bytes


def test_a_write_that_hangs_does_not_hang_the_probe(tmp_path, monkeypatch):
    gate, done = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        gate.wait(5)
        done.set()

    monkeypatch.setattr(node_probe.os, "fsync", slow)
    clock = StorageClock(tmp_path)
    clock.begin()
    clock.begin()  # not another one behind it
    assert clock.waiting_seconds() >= 0.0
    assert clock.last_seconds is None
    gate.set()
    assert done.wait(5)


def test_storage_that_is_gone_is_an_error(tmp_path):
    clock = StorageClock(tmp_path / "gone")
    clock._write()
    assert clock.error == "No such file or directory"
    assert clock.waiting_seconds() == 0.0


def test_a_pod_with_a_limit_has_what_is_left_of_it(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert memory_bytes(tmp_path) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path)[0] > 1_000_000
    assert space_bytes(tmp_path / "none") == (None, None)
