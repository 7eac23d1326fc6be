"""The passes that make block IR that Triton can express; the interpreter runs the result of each."""

from __future__ import annotations

from functools import partial

from tilekern.ir.core import Func
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.legalize.dtypes import TRITON
from tilekern.lower.triton.legalize.expand import expand
from tilekern.lower.triton.legalize.pad_tiles import pad_tiles
from tilekern.lower.triton.legalize.refuse import refuse, refuse_large_tiles
from tilekern.lower.triton.legalize.split_contractions import split_contractions
from tilekern.lower.triton.legalize.standard_forms import standard_forms
from tilekern.passes import pipeline
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.elide_masks import elide_masks
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, verified
from tilekern.passes.remove_derivatives import remove_derivatives
from tilekern.passes.split_loops import split_loops

# The loops of most kernels have no masks, so the first legalisation is without these passes.
_SPLIT = (split_loops, IMPROVE)


def passes(chip: Chip, split: bool = True) -> tuple[Pass | Rounds, ...]:
    """The passes for a GPU.

    Args:
      chip: the GPU.
      split: split loops into full, ragged and diagonal tiles; worth it for loops whose legal form has masks.
    """
    return (
        remove_derivatives,
        *(_SPLIT if split else ()),
        partial(refuse, chip=chip),
        split_contractions,
        dce,
        expand_bits,
        partial(expand, chip=chip),
        partial(legalize_dtypes, has=TRITON),
        cse,
        pad_tiles,
        standard_forms,
        *(canonicalize, elide_masks, canonicalize, cse, hoist_invariants, cse, dce),
        verified,
        refuse_large_tiles,
    )


def legalize(func: Func, chip: Chip, split: bool = False) -> Func:
    """The Func in the form that emitters take.

    Args:
      func: went through the passes of every Func.
      chip: the GPU.
      split: see `passes`.

    Raises:
      TargetError: the Func does something that the chip, or Triton, does not have.
    """
    return pipeline.run(func, passes(chip, split))
