"""Random programs that devices may divide: many have parts, and parts agree."""

from __future__ import annotations

from tilekern.testing.programs.batches import sample
from tilekern.testing.programs.divisible import Divisible
from tilekern.testing.programs.parts import assert_parts_agree


def test_one_program_in_eight_has_parts_and_parts_agree() -> None:
    programs = [sample(seed, make=Divisible)[0] for seed in range(120)]
    counts = [assert_parts_agree(program.func, program.arrays) for program in programs]
    assert sum(map(bool, counts)) >= len(programs) / 8
