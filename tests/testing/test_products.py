"""Random products of matrices: the Gluon emitter takes most of them, and their sums are exact."""

from __future__ import annotations

from tilekern.errors import ResourceError, TargetError
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.passes import pipeline
from tilekern.testing.programs import Program
from tilekern.testing.programs.batches import sample
from tilekern.testing.programs.products import Products

PROGRAMS = [sample(seed, make=Products)[0] for seed in range(40)]


def is_taken(program: Program) -> bool:
    try:
        build_gluon(pipeline.run(program.func), CHIPS["cuda:sm_90"], {})
    except (TargetError, ResourceError):
        return False
    return True


def test_most_programs_are_taken() -> None:
    assert sum(map(is_taken, PROGRAMS)) >= 0.8 * len(PROGRAMS)


def test_results_are_exact_or_near() -> None:
    tolerances = [tolerance for program in PROGRAMS for tolerance in program.tolerances]
    assert 0.2 < sum(tolerance == 0 for tolerance in tolerances) / len(tolerances) < 0.9
    assert max(tolerances) <= 1
