"""The kernels of the library at their default configuration, compiled for every kind of CPU, without any of them."""

from __future__ import annotations

import ctypes
import re

import pytest

from tests.lower.library import CASES, family
from tests.lower.llvm.machines import ALL
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.ffi_handler import HANDLER, RUN, with_handler
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.target import TARGETS

pytest.importorskip("llvmlite", reason="needs llvmlite")

EVERY = [
    (name, case.name, dtype) for name, cases in CASES.items() for case in cases for dtype in ("bfloat16", "float32")
]
# In `make test` the first case of each kernel, in one dtype or the other.
FEW = [(name, cases[0].name, ("bfloat16", "float32")[n % 2]) for n, (name, cases) in enumerate(CASES.items())]
# What a register of vectors is called, and what is called one that the machine has not.
REGISTERS = {64: ("zmm", "$."), 32: ("ymm", "zmm"), 16: (r"v\d+\.4s", r"\bz\d+\.s")}


@pytest.mark.parametrize("machine", [None, *ALL], ids=lambda m: m.cpu if m else "host")
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY if one not in FEW)],
)
def test_it_compiles(name: str, case: str, dtype: str, machine: Machine | None) -> None:
    lowering = LlvmLowering(family(name, case, dtype).func(TARGETS["cpu:llvm"]), machine)
    has, lacks = REGISTERS[lowering.machine.vector_bytes]
    assembly = toolchain._Codegen(with_handler(lowering.program).text, lowering.machine).assembly()
    assert f"{HANDLER}:" in assembly
    assert re.search(has, assembly) and not re.search(lacks, assembly)
    assert missing(assembly) <= {RUN}
    assert lowering.program.scratch <= 1 << 22  # of a second-level cache; a thread's own


def missing(assembly: str) -> set[str]:
    """Functions that the code calls, and that neither the code nor this process (its C library) defines."""
    called = set(re.findall(r"^\s+(?:callq?|jmp|bl|b)\s+([A-Za-z_]\w*)", assembly, re.MULTILINE))
    process = ctypes.CDLL(None)
    return {name for name in called if f"\n{name}:" not in assembly and not hasattr(process, name)}


def test_a_function_that_is_missing_is_found() -> None:
    assert missing("\nours:\n\tcallq\tours\n\tbl\tmemcpy\n\tcallq\t__truncdfhf2_of_nobody\n") == {
        "__truncdfhf2_of_nobody"
    }
