"""Budgets: seconds of the processor for the tests of a file, and for all, as they were recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import recorded

ROOT = Path(__file__).parent.parent

# Both processes together, as recorded on 2026-11-26. The aim on two cores is 10 minutes, for which these would be
# 2 * 10 * 60.
_OF_ALL = 2 * 15 * 60
# A long file that starts last is what one process does while the other one waits.
_OF_A_FILE = 50


def test_all_tests_together_keep_to_their_budget() -> None:
    assert sum(recorded().values()) <= _OF_ALL


@pytest.mark.parametrize("file", sorted(recorded()))
def test_a_file_keeps_to_its_budget(file: str) -> None:
    assert (ROOT / file).exists(), "run pytest --record-durations again"
    assert recorded()[file] <= _OF_A_FILE


RECORDING = """
import pathlib
from tests import durations
durations.FILE = pathlib.Path(__file__).with_name("durations.json")
def pytest_configure(config):
    config.pluginmanager.register(durations.Recorder(writes=not hasattr(config, "workerinput")))
"""
WORKING = """
import subprocess, sys
WORK = "import time\\nwhile time.process_time() < 0.7: pass"
def test_here():
    import time
    end = time.process_time() + 0.7
    while time.process_time() < end: pass
def test_in_a_process(): subprocess.run([sys.executable, "-c", WORK], check=True)
"""
ASLEEP = "def test_asleep(): __import__('time').sleep(1.2)"


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_is_recorded_are_the_seconds_of_the_processor(processes: str, tmp_path: Path) -> None:
    for name, text in (("conftest", RECORDING), ("test_working", WORKING), ("test_asleep", ASLEEP)):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    (seconds,) = json.loads((tmp_path / "durations.json").read_text()).items()
    assert seconds[0] == "test_working.py" and 1.4 <= seconds[1] < 3
