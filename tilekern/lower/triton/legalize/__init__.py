"""The passes that make block IR that Triton can express; the interpreter runs the result of each."""

from __future__ import annotations

from functools import partial

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, cdiv, round_up
from tilekern.ir.types import kind_of
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.triton.calibration import DELAYED_SUM_REGISTERS, OTHER_REGISTERS
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
from tilekern.passes.delay_dots import Sizes, delay_dots
from tilekern.passes.elide_masks import elide_masks
from tilekern.passes.guard_masks import guard_masks
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, verified
from tilekern.passes.remove_derivatives import remove_derivatives
from tilekern.passes.sink_scales import sink_scales
from tilekern.passes.split_loops import split_loops

# The loops of most kernels have no masks, so the first legalisation is without these passes.
_SPLIT = (split_loops, IMPROVE)


def passes(chip: Chip, split: bool = True, num_warps: int = 8, delay: bool = True) -> tuple[Pass | Rounds, ...]:
    """The passes for a GPU.

    Args:
      chip: the GPU.
      split: split loops into full, ragged and diagonal tiles; worth it for loops whose legal form has masks.
      num_warps: warps of a program, whose registers bound what `delay_dots` may keep.
      delay: let `delay_dots` rewrite loops; an emitter that delays products itself does without.
    """
    guard = partial(guard_masks, beside=_of_warpgroups)
    delayed = partial(delay_dots, beside=_is_whole, pays=partial(_pays, chip=chip, threads=32 * num_warps))
    return (
        remove_derivatives,
        partial(refuse, chip=chip),
        sink_scales,
        # Products of warpgroups run beside the instructions between them.
        *((guard, dce, IMPROVE) if chip.matrix_unit == "wgmma" else ()),
        *((delayed, IMPROVE) if chip.matrix_unit == "wgmma" and delay else ()),
        *(_SPLIT if split else ()),
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


def _pays(sizes: Sizes, chip: Chip, threads: int) -> bool:
    """True if registers hold what a delayed product needs, and as many programs fit a multiprocessor as without it."""
    before, after = (cdiv(elements, threads) + OTHER_REGISTERS for elements in (sizes.before, sizes.after))
    programs = [chip.registers_per_core // (threads * round_up(registers, 8)) for registers in (before, after)]
    fits = after <= chip.registers_per_thread and sizes.total <= threads * DELAYED_SUM_REGISTERS
    return fits and programs[0] == programs[1]


def _of_warpgroups(dot: Dot) -> bool:
    """True for dots that Triton multiplies by `wgmma`: of 16-bit floats, with at least 64 rows."""
    shape, dtype = dot.result.tile.shape, dot.operands[0].tile.dtype
    return kind_of(dtype) == "float" and dtype.itemsize == 2 and len(shape) >= 2 and shape[-2] >= 64


def _is_whole(dot: Dot) -> bool:
    """True for dots of warpgroups that `split_contractions` leaves whole: registers hold no parts of their operands."""
    (dims, _), operand = dot.contract, dot.operands[0].tile
    return _of_warpgroups(dot) and all(operand.shape[d] & (operand.shape[d] - 1) == 0 for d in dims)


def legalize(func: Func, chip: Chip, split: bool = False, num_warps: int = 8, delay: bool = True) -> Func:
    """The Func in the form that emitters take.

    Args:
      func: went through the passes of every Func.
      chip: the GPU.
      split: see `passes`.
      num_warps: see `passes`.
      delay: see `passes`.

    Raises:
      TargetError: the Func does something that the chip, or Triton, does not have.
    """
    return pipeline.run(func, passes(chip, split, num_warps, delay))
