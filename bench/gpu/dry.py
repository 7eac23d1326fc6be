"""Dry run, without a GPU: compile all programs of the plan for a target, print their resources and estimated cycles."""

from __future__ import annotations

from bench.gpu import estimates, prepare
from bench.gpu.item import Options, Record
from bench.gpu.plan import items
from bench.gpu.report import aligned

HEADER = ("item", "registers", "spills", "shared", "threads", "occupancy", "seconds")


def run(options: Options, target: str) -> int:
    """Print a line for each program; return 0 if all compiled, and 1 otherwise."""
    plan, rows, errors = items(options), [HEADER], 0
    programs: list[tuple[str, Record]] = []
    with prepare.pool(options, plan, target, oracles=False) as futures:
        for name, future in futures.items():
            ready = future.result()
            for resources in ready.programs:
                numbers = (resources[key] for key in ("registers", "spills", "shared_bytes", "threads", "occupancy"))
                programs.append((name, resources))
                rows.append((name, *(f"{number:g}" for number in numbers), f"{ready.seconds:.1f}"))
            for error in ready.errors:
                errors += 1
                print(f"FAIL {name}: {error}\n")
    print(aligned(rows))
    if len(table := estimates.rows(programs)) > 1:
        print(f"\nestimated cycles (bench/README.md)\n{aligned(table)}")
    for note in estimates.notes(programs):
        print(note)
    print(f"{len(rows) - 1} programs for {target}, {errors} errors")
    return 1 if errors else 0
