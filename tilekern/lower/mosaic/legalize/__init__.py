"""The passes that make block IR whose pure ops Mosaic has; the interpreter runs the result of each."""

from __future__ import annotations

from functools import partial

from tilekern.ir.core import Func
from tilekern.lower.mosaic.legalize.casts import MOSAIC
from tilekern.lower.mosaic.legalize.dots import expand_dots
from tilekern.lower.mosaic.legalize.emulate_float16 import emulate_float16
from tilekern.lower.mosaic.legalize.expand import expand
from tilekern.lower.mosaic.legalize.functions import expand_functions
from tilekern.lower.mosaic.legalize.gathered_loads import take_gathers
from tilekern.lower.mosaic.legalize.pointwise import separate_index_vectors
from tilekern.lower.mosaic.legalize.refuse import refuse
from tilekern.lower.mosaic.legalize.sines import expand_sines
from tilekern.lower.mosaic.legalize.standard_forms import standard_forms
from tilekern.lower.mosaic.legalize.unaligned_loads import align_loads
from tilekern.lower.mosaic.legalize.widen_moves import widen_moves
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.rewrite.remove_empty import remove_empty
from tilekern.passes import pipeline
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, verified
from tilekern.passes.remove_derivatives import remove_derivatives
from tilekern.passes.split_loops import split_loops


def passes(chip_name: str) -> tuple[Pass | Rounds, ...]:
    """The passes for a chip: "v5e", "v5p", "v6e" or "7x"."""
    return (
        remove_derivatives,
        # Most iterations need no mask once full tiles are apart from ragged and diagonal ones.
        *(split_loops, IMPROVE),
        partial(refuse, chip_name=chip_name),
        separate_index_vectors,
        *(remove_empty, dce),
        take_gathers,
        align_loads,
        expand_bits,
        emulate_float16,
        partial(legalize_dtypes, has=MOSAIC),
        widen_moves,
        expand_sines,
        expand_functions,
        partial(expand_dots, chip_name=chip_name),
        expand,
        *(canonicalize, cse, dce),
        standard_forms,
        *(cse, dce),
        verified,
    )


def legalize(func: Func, chip_name: str) -> Func:
    """The Func in the form that `lower.mosaic.emit.ops` has functions for.

    Refs of float16 become refs of float32: the caller widens the arrays before, and narrows them after, which is exact.
    Constants of several elements stay; a later step of the plan makes them inputs of the Pallas kernel.

    Args:
      func: went through the passes of every Func; its accesses see arrays in their own shapes.
      chip_name: "v5e", "v5p", "v6e" or "7x".

    Raises:
      TargetError: the Func does something that TPUs do not have.
    """
    return pipeline.run(func, passes(chip_name))
