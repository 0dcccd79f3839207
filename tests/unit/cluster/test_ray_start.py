import subprocess
import sys

_START = """
import runpy, sys
sys.argv = ["ray", "start", "--help"]
try:
    runpy.run_module("argusrl.cluster.ray_start", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("code", end.code)
print("heavy", [name for name in ("pandas", "fastapi", "aiohttp") if name in sys.modules])
"""


def test_it_is_rays_own_start_without_what_other_commands_import():
    ran = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, timeout=60, check=True)
    assert "--head" in ran.stdout
    assert "code 0" in ran.stdout
    assert "heavy []" in ran.stdout
