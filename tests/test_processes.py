"""Kernels on a mesh of the devices of two processes, which talk over the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "meshes" / "two_processes.py"


def test_two_processes_of_four_devices() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROGRAM.parents[2])}
    commands = [[sys.executable, str(PROGRAM), str(number), str(port)] for number in range(2)]
    processes = [
        subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
