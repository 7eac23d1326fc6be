"""Random programs and how they are made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest

from tilekern.ir.types import F64
from tilekern.passes.dce import dce
from tilekern.testing.programs import Program, build
from tilekern.testing.programs.batches import Choices, check, sample, script, shrink
from tilekern.testing.programs.reduction import reduced


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


def wrong_where(programs: Sequence[Program], name: str) -> Sequence[Sequence[np.ndarray]]:
    """The outputs of a backend that adds 1 to the outputs of programs in which an op of this name is needed."""
    wrong = [any(op.name == name for op in dce(program.func).walk()) for program in programs]
    return [[x + x.dtype.type(w) for x in p.expected] for p, w in zip(programs, wrong, strict=True)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["dot", "sort", "reduce", "fold"])
def test_a_failure_shows_a_script_of_at_most_twenty_lines_that_fails_again(name: str) -> None:
    with pytest.raises(AssertionError, match=r"^seed [0-9]+: ") as failure:
        check(range(100, 200), partial(wrong_where, name=name), dtypes=(F64,))
    _, _, shown = str(failure.value).partition("\n\n")
    assert len(shown.splitlines()) <= 20
    with pytest.raises(AssertionError, match=r"elements differ"):
        exec(shown, {})


def test_a_backend_without_a_name_is_left_to_the_reader() -> None:
    program, _ = sample(3)
    shown = script(program, lambda programs: [p.expected for p in programs])
    assert shown.endswith("assert_agrees(program, ...)  # for the dots: the outputs on the backend of the test")


def test_a_program_that_only_rounds_too_much_is_not_reduced_op_by_op() -> None:
    """Another value could round more than the tolerance of the output counts with."""
    program = next(p for p, _ in (sample(seed, dtypes=(F64,)) for seed in range(100)) if max(p.tolerances) > 0)

    def slightly_wrong(candidate: Program) -> bool:
        return max(candidate.tolerances, default=0.0) <= max(program.tolerances)

    assert reduced(program, slightly_wrong) is program
