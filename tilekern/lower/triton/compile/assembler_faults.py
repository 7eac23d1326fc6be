"""Faults of versions of NVIDIA's assembler that the programs of a kernel may meet."""

from __future__ import annotations

import warnings

from tilekern.errors import AssemblerWarning
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.program import Program

MISCOMPILES = (12, 8), (13, 3)
"""Releases of CUDA, from the first to before the second, whose ptxas miscompiles some programs with `wgmma`.

Reports name a left operand in registers: JAX's attention for Mosaic GPU refuses causal masks with 12.8.0 to 12.9.0 for
it. On an H100 a program without such operands, the forward pass of `distillation` with ragged rows, had wrong results
and illegal addresses by 12.8, and was right by 13.4, from the same PTX.
"""

_INSTRUCTION = "wgmma.mma_async"


def warn_of_faults(binary: Binary, program: Program) -> None:
    """Issue an `AssemblerWarning` at the kernel's line if a program has `wgmma` and ptxas is of `MISCOMPILES`."""
    if "ptx" not in binary.asm or not binary.code or _INSTRUCTION not in binary.text("ptx"):
        return
    assembler = toolchain.ptxas(binary.capability)
    major, minor = (int(part) for part in assembler.version.split("."))
    if not MISCOMPILES[0] <= (major, minor) < MISCOMPILES[1]:
        return
    loc = program.loc
    message = (
        f"ptxas of CUDA {assembler.version} miscompiles some programs that multiply by `wgmma`, "
        f"as {program.name} does.\n  got: {assembler.path}\n  fix: install a Triton with a later one (3.9 has "
        f"13.4), or let {toolchain.ptxas_variable(binary.capability)} name the ptxas of CUDA 13.3 or later; "
        "until then compare results with target='cpu'"
    )
    warnings.warn_explicit(message, AssemblerWarning, loc.file, loc.line)
