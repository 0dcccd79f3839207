"""argusrl doctor: what of this machine works, each line ✓ or ✗ with the fix."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json
from argusrl.errors import ArgusError, StorageError

_GIB = 1 << 30
_VLLM_DEADLINE_SECONDS = 300  # importing vLLM is slow on a cold disk


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    fix: str = ""  # what to do; only where not ok
    required: bool = True


def register(parent: typer.Typer) -> None:
    """Add the verb."""
    parent.command()(doctor)


def doctor(root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Check this machine: what is missing, and how to fix it. Exit code 1 if something required is."""
    probes: list[Callable[[], list[Check]]] = [
        check_python,
        check_machine,
        check_limits,
        lambda: check_root(root),
        check_sinks,
        check_torch,
        check_vllm,
        check_packing,
    ]
    checks: list[Check] = []
    for probe in probes:
        with redirect_stderr(io.StringIO()):  # progress bars of libraries
            found = _guarded(probe)
        checks += found
        if not as_json:
            for check in found:
                _say(check)
    healthy = all(check.ok for check in checks if check.required)
    if as_json:
        say_json({"healthy": healthy, "checks": [asdict(check) for check in checks]})
    if not healthy:
        raise typer.Exit(ArgusError.exit_code)


def _say(check: Check) -> None:
    say(f"{'✓' if check.ok else '✗'} {check.name:<16} {check.detail}", "green" if check.ok else "red")
    if not check.ok:
        say(f"    → {check.fix}", "cyan")


def _guarded(probe: Callable[[], list[Check]]) -> list[Check]:
    try:
        return probe()
    except Exception as error:
        name = getattr(probe, "__name__", "check").removeprefix("check_")
        return [Check(name, False, f"{type(error).__name__}: {error}", "set up again: make setup")]


def check_python() -> list[Check]:
    """Version of Python."""
    version = platform.python_version()
    return [Check("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "use Python 3.11 or newer")]


def check_machine() -> list[Check]:
    """Cores and memory."""
    import psutil

    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    gib = memory.available / _GIB
    detail = f"{gib:.1f} GiB of {memory.total / _GIB:.1f} GiB available"
    return [
        Check("cores", cores >= 2, f"{cores} usable", "give the container at least 2 CPUs"),
        Check("memory", gib >= 6, detail, "free memory: the quickstart needs about 6 GiB"),
    ]


def check_limits() -> list[Check]:
    """Shared memory for Ray's object store, and open files."""
    import resource

    checks = []
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / _GIB
        fix = "start the container with --shm-size=4g (Kubernetes: an emptyDir with medium: Memory)"
        checks.append(Check("/dev/shm", free >= 1, f"{free:.1f} GiB free", fix))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= 4096
    fix = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}"
    return [*checks, Check("open files", enough, f"ulimit -n is {soft:,}", fix)]


def check_root(root: Path) -> list[Check]:
    """Whether the run root can rename, link and fsync, and how fast."""
    from argusrl.storage.probe import probe_root

    try:
        probe = probe_root(root.absolute())
    except StorageError as error:
        return [Check("run root", False, error.message, error.hint)]
    speed = probe.write_bytes_per_second / (1 << 20)
    detail = f"{probe.root}: rename, link and fsync work; fsync {probe.fsync_seconds * 1e3:.1f} ms, {speed:.0f} MiB/s"
    enough = probe.free.bytes >= 2 * _GIB
    return [
        Check("run root", True, detail),
        Check("file system", True, probe.file_system.describe()),
        Check("disk", enough, probe.free.describe(), "free disk space, or set run.root to another disk"),
    ]


def check_sinks() -> list[Check]:
    """Optional packages."""
    checks = []
    for name in ("wandb", "mlflow"):
        installed = importlib.util.find_spec(name) is not None
        detail = "installed" if installed else f"not installed; optional: pip install 'argusrl[{name}]'"
        checks.append(Check(name, True, detail, required=False))
    return checks


def check_torch() -> list[Check]:
    """torch against the GPU driver."""
    import torch

    detail = f"{torch.__version__}, CUDA build {torch.version.cuda or 'none'}"
    driver = _driver_version()
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return [Check("torch", True, f"{detail}, driver {driver}: {torch.cuda.device_count()} × {', '.join(names)}")]
    if driver is None:
        return [Check("torch", True, f"{detail}; no GPU here, ranks run on the CPU")]
    fix = f"driver {driver} is too old for CUDA {torch.version.cuda}: update it, or install a torch for its CUDA"
    return [Check("torch", False, f"{detail} does not see the GPU", fix)]


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


_VLLM_PROBE = """
import json, typing, vllm
from vllm.config.lora import MaxLoRARanks
from vllm.platforms import current_platform
print(json.dumps({
    "version": vllm.__version__, "device": current_platform.device_type, "ranks": typing.get_args(MaxLoRARanks)
}))
"""


def check_vllm() -> list[Check]:
    """vLLM in a process of its own: importable, for which device, which LoRA ranks."""
    from argusrl.config.checks import LORA_RANKS_SERVED

    install = "make setup (CPU), or pip install 'argusrl[vllm]' (GPU)"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", _VLLM_PROBE]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_VLLM_DEADLINE_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check("vllm", False, f"no answer in {_VLLM_DEADLINE_SECONDS} s", install)]
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return [Check("vllm", False, f"import fails: {last}", install)]
    found = json.loads(answer.stdout.strip().splitlines()[-1])
    ranks = ", ".join(map(str, found["ranks"]))
    known = tuple(found["ranks"]) == LORA_RANKS_SERVED
    return [
        Check("vllm", True, f"{found['version']}, {found['device']} build"),
        Check("lora ranks", known, f"vLLM serves {ranks}", "this vLLM is not the pinned one: make setup"),
    ]


def check_packing() -> list[Check]:
    """Packed sequences give the same log-probabilities as single ones."""
    fix = "set up again: make setup"
    try:
        from argusrl.policy.selftest import packing_parity
    except ImportError as error:
        return [Check("packing parity", False, f"cannot run: {error}", fix)]
    found = packing_parity()
    detail = f"packed against single: logits differ by {found['max_logit_error']:.1e}, limit {found['limit']:.0e}"
    return [Check("packing parity", found["passed"], detail, fix)]
