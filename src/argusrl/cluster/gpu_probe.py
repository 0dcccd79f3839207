"""What NVML says about the GPUs of this node, if it has any. Nothing here raises: what fails is a reading, too."""

from __future__ import annotations

import importlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_THROTTLED = {  # NVML's name of a reason -> ours; the others (idle, application clocks) are wanted
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown",
}
_MOST_EVENTS = 100  # taken in one look


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as it answers now; None where it does not tell."""

    index: int
    uuid: str = ""
    temperature_celsius: float | None = None
    slowdown_celsius: float | None = None  # where its own protection sets in
    uncorrected_ecc: int | None = None  # errors since the driver was loaded
    throttled: tuple[str, ...] = ()
    lost: bool = False  # it has fallen off the bus, or needs a reset


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """An error that the GPU's driver reported."""

    gpu: int
    number: int
    time: float  # seconds since 1970, of the look that found it


@dataclass(slots=True)
class GpuProbe:
    """Holds NVML open, with one event set for all GPUs. `nvml` is the module pynvml, None where it is missing."""

    nvml: Any = None
    handles: list[Any] = field(default_factory=list)
    problem: str = ""  # why NVML says nothing although it is installed
    _events: Any = None

    @classmethod
    def open(cls) -> GpuProbe:
        """With the module of nvidia-ml-py, if it is installed and finds a driver."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls()
        return cls.of(nvml)

    @classmethod
    def of(cls, nvml: Any) -> GpuProbe:
        """With this module."""
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except Exception as error:  # a machine without GPUs has no driver
            return cls(None, problem="" if "NotFound" in type(error).__name__ else f"NVML: {error}")
        probe = cls(nvml)
        for index in range(count):
            with suppress(Exception):
                probe.handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        probe._listen()
        return probe

    def _listen(self) -> None:
        with suppress(Exception):
            self._events = self.nvml.nvmlEventSetCreate()
        for handle in self.handles:
            with suppress(Exception):  # not every GPU has them
                self.nvml.nvmlDeviceRegisterEvents(handle, self.nvml.nvmlEventTypeXidCriticalError, self._events)

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU that there was when the probe was opened."""
        return tuple(self._gpu(index, handle) for index, handle in enumerate(self.handles))

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml, lost = self.nvml, False

        def ask(name: str, *arguments: Any) -> Any:
            nonlocal lost
            try:
                return getattr(nvml, name)(handle, *arguments)
            except Exception as error:
                lost = lost or type(error).__name__ in ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
                return None

        uuid = ask("nvmlDeviceGetUUID")
        temperature = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        slowdown = ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        ecc = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        throttled = tuple(text for name, text in _THROTTLED.items() if reasons & getattr(nvml, name, 0))
        return Gpu(
            index=index,
            uuid=uuid.decode() if isinstance(uuid, bytes) else uuid or "",
            temperature_celsius=temperature,
            slowdown_celsius=slowdown,
            uncorrected_ecc=ecc,
            throttled=throttled,
            lost=lost,
        )

    def xids(self) -> tuple[Xid, ...]:
        """What was reported since the last call."""
        found: list[Xid] = []
        with suppress(Exception):  # that no more are there is an error, too
            while self._events is not None and len(found) < _MOST_EVENTS:
                event = self.nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType & self.nvml.nvmlEventTypeXidCriticalError:
                    index = int(self.nvml.nvmlDeviceGetIndex(event.device))
                    found.append(Xid(gpu=index, number=int(event.eventData), time=time.time()))
        return tuple(found)
