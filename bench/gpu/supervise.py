"""The parent process: it starts children until the plan is done or time is up, kills hanging ones, writes gpu.json.

Work on a GPU may kill or break its process, or never end. So the parent uses no GPU. An item that a child leaves
unfinished is recorded as a crash, and the next child continues after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu.item import Options, Record
from bench.gpu.journal import Journal
from bench.gpu.plan import Budget
from bench.gpu.work import NO_GPU

STALL = 150.0
"""Seconds without a line in the journal after which a child is killed; the first item waits for its preparation."""

POLL = 0.5
RESERVE = 8.0  # seconds of the budget to stop, write and print
LEAST = 20.0  # seconds that must be left to start a child
CHILDREN = 25
GPU_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "triton", "torch", "numpy", "nvidia-cudnn-cu13")


def supervise(options: Options) -> Record:
    """Run the plan in children, and return the content of gpu.json. An interrupt ends the run early, without loss."""
    options.out.mkdir(parents=True, exist_ok=True)
    budget, journal = Budget(options.seconds - RESERVE), Journal(options.out / "journal.jsonl")
    journal.path.unlink(missing_ok=True)
    results: Record = {"environment": environment(options), "items": {}}
    with contextlib.suppress(KeyboardInterrupt):
        _run_children(options, budget, journal, results)
    results["items"] = journal.read()
    results["environment"]["seconds"] = round(options.seconds - RESERVE - budget.left, 1)
    write(options.out, results)
    return results


def _run_children(options: Options, budget: Budget, journal: Journal, results: Record) -> None:
    for _ in range(CHILDREN):
        if budget.left < LEAST:
            return
        before = len(journal.read())
        status = _run_child(options, budget, journal, results)
        _close(journal, status)
        if status in (0, NO_GPU) or len(journal.read()) == before:
            return


def _run_child(options: Options, budget: Budget, journal: Journal, results: Record) -> int | str:
    """Run one child, and return its exit status, or the reason why it was killed."""
    # JAX and PyTorch share the GPU's memory, so JAX must not allocate most of it at its start.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with (options.out / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            _command(options, budget.left), stdout=log, stderr=log, env=variables, start_new_session=True
        )
        try:
            return _watch(child, options, budget, journal, results)
        finally:
            # The child's session includes the processes that prepare items.
            if child.poll() is None or not _gone(child.pid):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _command(options: Options, seconds: float) -> list[str]:
    """The command of a child."""
    command = [sys.executable, "-u", "-m", "bench.gpu", "--child", "--out", str(options.out)]
    command += ["--seed", str(options.seed), "--seconds", str(seconds), "--only", options.only]
    command += ["--tune", options.tune] if options.tune else []
    return command + (["--dry", options.launch, "--launch"] if options.launch else [])


def _watch(
    child: subprocess.Popen[bytes], options: Options, budget: Budget, journal: Journal, results: Record
) -> int | str:
    size, changed = -1, time.monotonic()
    while child.poll() is None:
        time.sleep(POLL)
        now = journal.path.stat().st_size if journal.path.exists() else 0
        if now != size:
            size, changed = now, time.monotonic()
            write(options.out, results | {"items": journal.read()})
        if time.monotonic() - changed > STALL:
            return f"no sign of life for {STALL:.0f} s"
        if budget.left < 0:
            return "time is up"
    return child.returncode


def _gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def _close(journal: Journal, status: int | str) -> None:
    """Record an unfinished item as a crash of the child, unless time ran out."""
    for name, record in journal.read().items():
        if record is None:
            judged: Record = {} if status == "time is up" else {"ok": False}
            journal.end(name, judged | {"text": f"the process ended within this item: {status}; see log.txt"})


def environment(options: Options) -> Record:
    """The conditions of the measurement: machine, versions, commit, options."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "gpu": _output("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"),
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "changed": bool(_output("git", "-C", str(Path(__file__).parent), "status", "--porcelain", "-uno")),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "seed": options.seed,
        "tune": options.tune,
        "only": options.only,
    }


def write(folder: Path, results: Record) -> None:
    """Write gpu.json by renaming, so that it is complete at any moment."""
    incomplete = folder / "gpu.json.new"
    incomplete.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    incomplete.replace(folder / "gpu.json")


def _output(*command: str) -> str | None:
    """The output of a command; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done: Any = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
