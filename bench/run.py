"""Run the benchmarks, print results as they come, then a table, and write the results to bench/out/ as JSON.

    python -m bench.run [NAME...]

NAME is a name of `FILES`; "llvm" stands for all that begin with "llvm.". Without names all benchmarks run. The exit
status is 1 if a result misses its limit.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax

from bench import (
    adamw,
    attention,
    attention_gradient,
    blocks,
    cross_entropy,
    decode,
    derived,
    distillation,
    gradients,
    matmul,
    muon,
    overhead,
    quantized,
    ragged_dot,
    recurrences,
    rows,
    sample,
    sharding,
    tuning,
    vmap,
)
from bench.llvm import attention as llvm_attention
from bench.llvm import irregular as llvm_irregular
from bench.llvm import matmul as llvm_matmul
from bench.llvm import overhead as llvm_overhead
from bench.llvm import peak as llvm_peak
from bench.llvm import rows as llvm_rows
from bench.result import Result, missed, table

FILES = {
    "llvm.peak": llvm_peak,
    "llvm.attention": llvm_attention,
    "llvm.matmul": llvm_matmul,
    "llvm.rows": llvm_rows,
    "llvm.irregular": llvm_irregular,
    "llvm.overhead": llvm_overhead,
    "adamw": adamw,
    "attention": attention,
    "attention_gradient": attention_gradient,
    "blocks": blocks,
    "cross_entropy": cross_entropy,
    "decode": decode,
    "derived": derived,
    "distillation": distillation,
    "gradients": gradients,
    "matmul": matmul,
    "muon": muon,
    "overhead": overhead,
    "quantized": quantized,
    "ragged_dot": ragged_dot,
    "recurrences": recurrences,
    "rows": rows,
    "sample": sample,
    "sharding": sharding,
    "tuning": tuning,
    "vmap": vmap,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all without names; return the exit status: 1 if a result misses its limit."""
    results: list[Result] = []
    for name in chosen(names):
        print(f"bench: {name}", file=sys.stderr)
        for result in FILES[name].measure():
            print("  ", *(cell for cell in result.cells() if cell), file=sys.stderr, flush=True)
            results.append(result)
    print(table(results))
    print(missed(results), end="")
    print(f"written to {write(results)}", file=sys.stderr)
    return 0 if all(result.passed for result in results) else 1


def chosen(names: list[str]) -> list[str]:
    """The benchmarks that the names select, by full name or by the part before the dot; all if none are named."""
    unknown = [name for name in names if not any(name in (file, file.partition(".")[0]) for file in FILES)]
    if unknown:
        sys.exit(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(FILES)}")
    return [file for file in FILES if not names or {file, file.partition(".")[0]} & set(names)]


def write(results: list[Result]) -> Path:
    """Write the results and a description of the machine to a JSON file named by date and time; return its path."""
    path = Path(__file__).parent / "out" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(exist_ok=True)
    rows = [asdict(r) | {"judged": r.judged, "passed": r.passed} for r in results]
    machine = {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    path.write_text(json.dumps({"machine": machine, "results": rows}, indent=2, ensure_ascii=False) + "\n")
    return path


def _processor() -> str:
    """The name of the processor; `platform` knows it on few systems, so Linux is asked first."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
