"""Run the files of tests/meshes in processes with 8 devices: JAX fixes the number of CPU devices when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sweeps

FOLDER = Path(__file__).parent / "meshes"
# A process takes seconds to start, so those that are quick share one. The first run with the oldest versions, too.
SMOKE = ("test_divided.py", "test_parts.py", "test_platforms.py")
LONG = (
    "test_library_table.py",
    "test_moe.py",
    "test_random_divided.py",
    "test_sequence_parallel.py",
    "test_shard_map.py",
    "test_train.py",
)
OTHERS = tuple(sorted({path.name for path in FOLDER.glob("test_*.py")} - {*SMOKE, *LONG}))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SMOKE, marks=pytest.mark.smoke, id="smoke"),
        *(pytest.param((name,), id=name) for name in LONG),
        pytest.param(OTHERS, id="others"),
    ],
)
def test_on_eight_devices(names: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    chosen = "not slow" if "slow" in request.config.getoption("markexpr") else ""
    sample = sweeps.choose(request.config)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", chosen, "--sweep", sample]
    command += [str(FOLDER / name) for name in names]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
        timeout=900 if sample == "all" else 300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
