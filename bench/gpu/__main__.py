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
    made = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("bench/out/gpu"), help="folder for the results")
    made.add_argument("--seconds", type=float, help="start no item after this time")
    made.add_argument("--seed", type=int, help="seed of all inputs; by default a random one")
    made.add_argument("--only", default="", metavar="REGEX", help="only items whose name matches")
    tunable = ("attention", "backward", "matmul")
    made.add_argument("--tune", default="", choices=tunable, help="rank variants of a schedule")
    made.add_argument("--dry", nargs="?", const="cuda:sm_90", metavar="TARGET", help="compile all; launch nothing")
    made.add_argument("--launch", action="store_true", help="with --dry: launch all on a pretended GPU")
    made.add_argument("--show", action="store_true", help="print the tables of an earlier run")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status."""
    made = parser()
    given = made.parse_args(arguments)
    if given.launch and not given.dry:
        made.error("--launch is an option of --dry")
    seconds = (LAUNCH_SECONDS if given.launch else SECONDS) if given.seconds is None else given.seconds
    seed = secrets.randbits(32) if given.seed is None else given.seed
    target = given.dry if given.launch else ""
    options = Options(given.out.resolve(), seed, seconds, given.only, given.tune, target)
    if given.child and given.launch:
        launch.pretend(options)
        return launch.work(options)
    if given.child:
        return work(options)
    if given.dry:
        return dry.run(options, given.dry) or (launch.run(options) if given.launch else 0)
    if given.show:
        kept = json.loads((options.out / "gpu.json").read_text())
    else:
        print(f"seed {seed}; results in {options.out}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints the results so far
        kept = supervise(options)
    print(report(kept))
    if not kept["items"]:
        print(f"nothing ran: is there an NVIDIA GPU, and JAX with CUDA? See {options.out / 'log.txt'}")
    return status(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
