"""Random programs and how they are made smaller."""

from __future__ import annotations

from random import Random

import pytest

from tilekern.testing.programs import build
from tilekern.testing.programs.batches import Choices, sample, shrink


class Limited(Choices):
    """Choices that end."""

    def __call__(self, most: int) -> int:
        assert len(self.made) < 20_000, "a program takes choices for ever"
        return super().__call__(most)


@pytest.mark.parametrize("seed", range(24, 30))
def test_programs_of_some_of_the_choices_end(seed: int) -> None:
    """A shrinker leaves choices out; those behind the last one are zeros."""
    _, choices = sample(seed)
    random = Random(seed + 10**6)
    for _ in range(12):
        at, size = random.randrange(len(choices)), random.choice([1, 4, 16, 64])
        for between in ([], [0] * size):
            build(Limited([*choices[:at], *between, *choices[at + size :]]))


def test_shrink_leaves_out_what_the_problem_does_not_need() -> None:
    program, choices = sample(3)
    stores = [op for op in program.func.walk() if op.name == "store"]
    assert stores
    small = shrink(choices, lambda p: any(op.name == "store" for op in p.func.walk()))
    assert len(list(small.func.walk())) < len(list(program.func.walk())) / 2
