"""Block IR → block IR that Triton can express; each step is a rewrite whose result the interpreter runs as well.

refuse               what cannot be done
split_contractions   dots of loads, cut where the contracted size is no power of two
expand               ops and dtypes that Triton lacks, by those it has
pad_tiles            every size a power of two
standard_forms       dots of [M, K] and [K, N], sorts of [rows, lanes]
"""

from __future__ import annotations

from dataclasses import replace

from tilekern.ir.core import Func
from tilekern.ir.verify import verify
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.legalize.expand import expand
from tilekern.lower.triton.legalize.pad_tiles import Padded, pad_tiles
from tilekern.lower.triton.legalize.refuse import refuse, refuse_large_tiles
from tilekern.lower.triton.legalize.split_contractions import split_contractions
from tilekern.lower.triton.legalize.standard_forms import standard_forms
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.elide_masks import elide_masks
from tilekern.passes.hoist_invariants import hoist_invariants


def legalize(func: Func, chip: Chip) -> Padded:
    """The Func in the form that emitters take.

    Args:
      func: went through the pipeline of passes.
      chip: what it shall run on.

    Raises:
      TargetError: the Func does something that the chip, or Triton, does not have.
    """
    refuse(func, chip)
    padded = pad_tiles(cse(expand(dce(split_contractions(func)), chip)))
    func = standard_forms(padded.func)
    for improve in (canonicalize, elide_masks, canonicalize, cse, hoist_invariants, cse, dce):
        func = improve(func)
    verify(func)
    refuse_large_tiles(func)
    return replace(padded, func=func)
