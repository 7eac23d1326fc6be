"""python -m bench.gpu --out FOLDER: check the kernels on this machine's NVIDIA GPU, time them, print tables.

FOLDER gets gpu.json (all numbers; complete at any moment), journal.jsonl and log.txt. The exit status is 0 if no result
of tilekern was wrong.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import dry, launch
from bench.gpu.item import Options
from bench.gpu.report import report, status
from bench.gpu.supervise import supervise
from bench.gpu.work import work

SECONDS = 460.0  # 8 minutes, less the time to stop and print
LAUNCH_SECONDS = 3600.0  # on a pretended GPU nothing is lost


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    command.add_argument("--out", type=Path, default=Path("bench/out/gpu"), help="folder for the results")
    command.add_argument("--seconds", type=float, help="start no item after this time")
    command.add_argument("--seed", type=int, help="seed of all inputs; by default a random one")
    command.add_argument("--only", default="", metavar="REGEX", help="only items whose name matches")
    tunable = ("attention", "backward", "matmul")
    command.add_argument("--tune", default="", choices=tunable, help="rank variants of a schedule")
    command.add_argument("--dry", nargs="?", const="cuda:sm_90", metavar="TARGET", help="compile all; launch nothing")
    command.add_argument("--launch", action="store_true", help="with --dry: launch all on a pretended GPU")
    command.add_argument("--show", action="store_true", help="print the tables of an earlier run")
    command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return command


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status."""
    command = parser()
    parsed = command.parse_args(arguments)
    if parsed.launch and not parsed.dry:
        command.error("--launch is an option of --dry")
    seconds = (LAUNCH_SECONDS if parsed.launch else SECONDS) if parsed.seconds is None else parsed.seconds
    seed = secrets.randbits(32) if parsed.seed is None else parsed.seed
    target = parsed.dry if parsed.launch else ""
    options = Options(parsed.out.resolve(), seed, seconds, parsed.only, parsed.tune, target)
    if parsed.child and parsed.launch:
        launch.pretend(options)
        return launch.work(options)
    if parsed.child:
        return work(options)
    if parsed.dry:
        return dry.run(options, parsed.dry) or (launch.run(options) if parsed.launch else 0)
    if parsed.show:
        results = json.loads((options.out / "gpu.json").read_text())
    else:
        print(f"seed {seed}; results in {options.out}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints the results so far
        results = supervise(options)
    print(report(results))
    if not results["items"]:
        print(f"nothing ran: is there an NVIDIA GPU, and JAX with CUDA? See {options.out / 'log.txt'}")
    return status(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
