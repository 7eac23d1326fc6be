"""Faults of versions of NVIDIA's assembler that the programs of a kernel may meet."""

from __future__ import annotations

import re
import warnings

from tilekern.errors import AssemblerWarning
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.program import Program

MISCOMPILES = (12, 8), (13, 3)
"""Releases of CUDA, from the first to before the second, whose ptxas is reported to miscompile some `wgmma` with a left
operand in registers. JAX's attention for Mosaic GPU refuses causal masks with 12.8.0 to 12.9.0 for it."""

# PTX ISA, "wgmma.mma_async": the sums are a vector; the left operand is one, too, or the descriptor of shared memory.
_FROM_REGISTERS = re.compile(r"wgmma\.mma_async\.sync\.aligned[.\w]*\s*\{[^}]*\},\s*\{")


def warn_of_faults(binary: Binary, program: Program) -> None:
    """Issue an `AssemblerWarning` at the kernel's line if ptxas is reported to miscompile programs like this one."""
    if "ptx" not in binary.asm or not binary.code or not _FROM_REGISTERS.search(binary.text("ptx")):
        return
    assembler = toolchain.ptxas(binary.capability)
    major, minor = (int(part) for part in assembler.version.split("."))
    if not MISCOMPILES[0] <= (major, minor) < MISCOMPILES[1]:
        return
    loc = program.loc
    message = (
        f"ptxas of CUDA {assembler.version} is reported to compute wrong results where `wgmma` takes an operand from "
        f"registers, as in {program.name}.\n  got: {assembler.path}\n  fix: install a Triton with a later one (3.9 has "
        f"13.4), or let {toolchain.ptxas_variable(binary.capability)} name the ptxas of CUDA 13.3 or later; "
        "until then compare results with target='cpu'"
    )
    warnings.warn_explicit(message, AssemblerWarning, loc.file, loc.line)
