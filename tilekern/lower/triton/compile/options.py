"""All options of Triton that change the code, so that neither a version's defaults nor the environment decide.

`max_num_imprecise_acc_default` is not among them, because Triton overwrites it; each dot states its own. A version of
Triton ignores options that it does not have.
"""

from __future__ import annotations

from typing import Any

from tilekern.ir.quote import code_of
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.program import Program
from tilekern.lower.triton.vendor import AMD


def options(program: Program, chip: Chip) -> dict[str, Any]:
    """The options by which Triton compiles a program for a chip."""
    return {
        "num_warps": program.num_warps,
        "num_stages": program.num_stages,
        "num_ctas": program.cluster,
        "warp_size": chip.vendor.lanes,
        "enable_fp_fusion": True,
        "launch_cooperative_grid": False,
        "default_dot_input_precision": "ieee",
        # Without it Triton drops assertions.
        "debug": "tl.device_assert" in code_of(program.text),
        # Integers wrap, as everywhere in the language.
        "sanitize_overflow": False,
        "instrumentation_mode": "",
        "arch": chip.architecture,
        **(_of_amd() if chip.vendor is AMD else _of_nvidia(chip, program.start_registers)),
    }


def _of_nvidia(chip: Chip, start_registers: int | None) -> dict[str, Any]:
    return {
        "maxnreg": start_registers,
        # The oldest with the chip, so every driver for it reads it. By default Triton writes the newest version of its
        # own ptxas, which the ptxas or the driver of a machine may refuse.
        "ptx_version": chip.ptx_version,
        "ptx_options": "",
        "enable_reflect_ftz": True,
        "sched4reg": False,
        "clc": False,
        "launch_pdl": False,
    }


def _of_amd() -> dict[str, Any]:
    return {
        # 0: the compiler chooses the waves of a SIMD, and so the registers of a thread, by the size of a program.
        "waves_per_eu": 0,
        # 0: Triton chooses the size of matrix instructions.
        "matrix_instr_nonkdim": 0,
        "kpack": 1,
        "allow_flush_denorm": False,
        "llvm_fn_attrs": "",
    }
