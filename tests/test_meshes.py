"""Run each file of tests/meshes in a process with 8 devices: JAX fixes the number of CPU devices when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(path.name for path in (Path(__file__).parent / "meshes").glob("test_*.py"))


@pytest.mark.smoke
@pytest.mark.parametrize("name", FILES)
def test_on_eight_devices(name: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", str(Path(__file__).parent / "meshes" / name)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": flags}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
