"""Products and attention of the library: small cases are simulated, real ones compiled; the same of others."""

from __future__ import annotations

import pytest

from tests.lower.library import CASES, NAMES, family, family_of
from tests.lower.triton.gluon.samples import SM_90, assert_computes
from tilekern.errors import ResourceError, TargetError
from tilekern.kernel.instance import Instance
from tilekern.lower.target import resolve
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.resources import measure
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.lower.triton.program import Program

GLUON = resolve("cuda:sm_90+gluon")
TAKEN = ("flash_attention", "matmul")
# Rows of these arrays are no multiples of 16 bytes.
UNALIGNED = {"gpt2_logits"}
UNALIGNED_SMALL = {"phi_2", "stable_diffusion_cross", *UNALIGNED}
# Causal heads of 256 spill bytes with Triton 3.9, outside of the loop of products; heads of qk 192 are in two parts.
SPILL = {"gemma_2b", "deepseek_v3"}
ALL = [(name, case.name) for name in TAKEN for case in CASES[name]]


def built(made: Instance) -> Program:
    return build_gluon(made.func(GLUON), SM_90, made.launch(GLUON))


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, c in ALL if c not in UNALIGNED_SMALL])
def test_a_small_case_is_computed(name: str, case: str) -> None:
    (found,) = (c for c in CASES[name] if c.name == case)
    made = family_of(name, found.small(), "bfloat16")
    assert_computes(built(made), made.func(GLUON), seeds=(5,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [(n, c) for n, c in ALL if c not in UNALIGNED | SPILL])
def test_a_case_compiles_without_spills(name: str, case: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    resources = measure(compile_program(built(family(name, case, "bfloat16")), SM_90), SM_90)
    assert resources.spills == 0 and resources.serialized is False


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TAKEN])
def test_the_other_kernels_are_refused_with_a_reason_or_computed(name: str) -> None:
    for case in CASES[name]:
        try:
            made = family_of(name, case.small(), "bfloat16")
            program = built(made)
        except (ResourceError, TargetError) as error:
            assert error.summary.startswith("the ") and error.fix
        except ValueError:  # the function calls several kernels
            continue
        else:
            assert_computes(program, made.func(GLUON), seeds=(5,))
            return
