"""Seconds of an explanation of each library kernel: the kernel's own estimate, and its trials of other blocks.

    python -m bench.explanations                                    # all cases, on "cpu:llvm" and cuda:sm_90
    python -m bench.explanations sample "matmul square" --targets tpu:v5e,tpu:v6e

Explanations are made one after the other in one process, so the first one of a target also imports its compiler, and
may measure the rates of this machine. Seconds are by the wall. The exit status is 1 if one took longer than asked: 2
seconds on CPUs, 15 elsewhere. Arrays that decide how often a loop runs hold values that rise up to the rows of the
first array; other numbers of this kind, and matrices, are 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern.kernels
from bench.texts import function_of
from tilekern.errors import TilekernError
from tilekern.estimate.data_loops import data_loops
from tilekern.estimate.explain import Variants, explain
from tilekern.ir.core import Func
from tilekern.kernel.composite import called
from tilekern.kernel.instance import Instance
from tilekern.lower.target import Target, resolve

TARGETS = ("cpu:llvm", "cuda:sm_90")


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says, and return the exit status."""
    cli = argparse.ArgumentParser(prog="python -m bench.explanations", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("names", nargs="*", help='functions, or their cases: matmul, or "matmul square"; all by default')
    cli.add_argument("--targets", default=",".join(TARGETS), metavar="A,B", help="default: %(default)s")
    options = cli.parse_args(arguments)
    warnings.simplefilter("ignore")
    slow = 0
    for target in map(resolve, options.targets.split(",")):
        explained = [seconds(title, kernel, target) for title, kernel in kernels(options.names, target)]
        taken = [s for s in explained if s is not None]
        slow += sum(s > (2 if target.full_name.startswith("cpu") else 15) for s in taken)
        if taken:
            print(
                f"{target.full_name}: {len(taken)} explanations, median {median(taken):.2f} s, longest {max(taken):.2f}"
            )
    return 1 if slow else 0


def kernels(names: Sequence[str], target: Target) -> Iterator[tuple[str, Instance]]:
    """The kernels with blocks that the library's functions call for their cases, each with the title of its case."""
    for path in sorted(Path(tilekern.kernels.__path__[0]).glob("*/cases.py")):
        name = path.parent.name
        for case in importlib.import_module(f"tilekern.kernels.{name}.cases").CASES:
            title = f"{name} {case.name}"
            if not names or name in names or title in names:
                arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
                for kernel, _ in called(jax.make_jaxpr(function_of(name, case))(*arrays), target):
                    if kernel.tuning is not None:
                        yield title, kernel


def seconds(title: str, kernel: Instance, target: Target) -> float | None:
    """The seconds of a kernel's explanation, None if the target refuses it; printed with the number of trials."""
    tuning = kernel.tuning
    assert tuning is not None
    begin = time.monotonic()
    try:
        lowering: Any = kernel.lowered(target)
        sizes = {name: size for name, size in tuning.settings(target).items() if type(size) is int}
        variants = Variants(sizes, lambda changes: tuning.varied(changes, None).lowered(target)) if sizes else None
        unknown = [None] * len(lowering.func.inputs)
        explanation = explain(lowering, target, unknown, values_of(lowering.func), variants, None)
        said = f"{explanation.tried} tried, {len(explanation.untried)} not"
        said += f"; {explanation.unestimated}" if explanation.unestimated else ""
    except TilekernError as error:
        print(f"{title}, {target.full_name}: refused, {error.summary}", flush=True)
        return None
    taken = time.monotonic() - begin
    print(f"{title}, {target.full_name}: {taken:.2f} s, {said}", flush=True)
    return taken


def values_of(func: Func) -> dict[str, Any]:
    """Values of the arrays that decide how often loops run: by the rule of this module."""
    rows = func.inputs[0].ref.shape[0]

    def rising(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.linspace(rows / max(shape[0], 1), rows, shape[0]).astype(dtype) if len(shape) == 1 else 1

    deciding = {param for params in data_loops(func).values() for param in params}
    return {param.name: rising(param.ref.shape, param.ref.dtype) for param in deciding}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
