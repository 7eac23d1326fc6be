"""Run each file of tests/meshes in a process with 8 devices: JAX fixes the number of CPU devices when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(path.name for path in (Path(__file__).parent / "meshes").glob("test_*.py"))


# The quick ones run with the oldest versions, too.
SMOKE = ("test_divided.py", "test_parts.py", "test_platforms.py")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] if n in SMOKE else []) for n in FILES])
def test_on_eight_devices(name: str, request: pytest.FixtureRequest) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    file, marks = Path(__file__).parent / "meshes" / name, request.config.getoption("markexpr")
    chosen = "not slow" if "slow" in marks else ""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", chosen, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": flags}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
