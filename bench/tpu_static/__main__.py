"""python -m bench.tpu_static: cycles, stalls, slot use and DMA bytes of our kernels and their peers, without a TPU.

Writes tpu-static.json and tpu-static.png into the folder --out, beside rows of earlier runs with the same versions, and
prints a table; the status is 0 if all aims are met. The figures of the peers are kept in
bench/results/tpu-static-peers.json for one version of JAX and libtpu.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.tpu_static.cases import CASES
from bench.tpu_static.compare import CACHE, OURS, PeerCache, Record, compare, versions
from bench.tpu_static.picture import draw
from bench.tpu_static.table import aims, table
from tilekern.estimate.tpu.chips import CHIPS


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="python -m bench.tpu_static", description=(__doc__ or "").splitlines()[0])
    command.add_argument("--out", type=Path, default=Path("bench/out/tpu"), help="folder for the results")
    command.add_argument("--only", default="", metavar="REGEX", help="cases whose name it occurs in")
    command.add_argument("--chips", nargs="+", default=["v5e", "v6e", "7x"], choices=CHIPS, metavar="CHIP")
    command.add_argument("--show", action="store_true", help="print and draw the results of an earlier run")
    return command


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status."""
    parsed = parser().parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    results = parsed.out / "tpu-static.json"
    if not parsed.show:
        cases = [case for case in CASES if re.search(parsed.only, case.name)]
        if not cases:
            print(f"no case has {parsed.only!r} in its name")
            return 2
        if find_spec("tokamax") is None:
            print("tokamax is not installed: its kernels are left out", file=sys.stderr)
        rows = compare(cases, parsed.chips, PeerCache(CACHE), lambda line: print(line, file=sys.stderr, flush=True))
        contents = {"versions": versions(), "rows": _earlier(results) | rows}
        results.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
    rows = json.loads(results.read_text())["rows"]
    print(table(rows))
    try:
        draw(rows, results.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    return 0 if all(aim.met for aim in aims(rows)) and all("us" in row[OURS] for row in rows.values()) else 1


def _earlier(results: Path) -> dict[str, Record]:
    """The rows of an earlier run in the same folder; none if that had other versions."""
    earlier: Record = json.loads(results.read_text()) if results.exists() else {}
    return earlier["rows"] if earlier.get("versions") == versions() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
