"""The passes that make block IR of the ops that the emitter has; the interpreter runs the result of each."""

from __future__ import annotations

from functools import partial

from tilekern.ir.core import Func
from tilekern.lower.llvm.legalize.dtypes import LACKS, LLVM
from tilekern.lower.llvm.legalize.expand import expand
from tilekern.lower.llvm.legalize.slice_splits import slice_splits
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.rewrite.remove_empty import remove_empty
from tilekern.lower.sizes import refuse_large
from tilekern.passes import pipeline
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, verified
from tilekern.passes.remove_derivatives import remove_derivatives
from tilekern.passes.split_loops import split_loops


def passes(machine: Machine) -> tuple[Pass | Rounds, ...]:
    """The passes for a CPU."""
    return (
        remove_derivatives,
        partial(refuse_large, backend="the backend for CPUs"),
        *(split_loops, IMPROVE),
        remove_empty,
        slice_splits,
        partial(expand_bits, lacks=LACKS),
        partial(expand, machine=machine),
        partial(legalize_dtypes, has=LLVM),
        *(canonicalize, cse, hoist_invariants, cse, dce),
        verified,
    )


def legalize(func: Func, machine: Machine) -> Func:
    """The Func in the form that the emitter takes.

    Args:
      func: went through the passes of every Func.
      machine: the CPU.

    Raises:
      TargetError: the Func does something that the backend does not have.
    """
    return pipeline.run(func, passes(machine))
