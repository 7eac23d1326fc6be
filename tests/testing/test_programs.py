"""Random programs and how they are made smaller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest

from tilekern.ir.core import Value
from tilekern.ir.shape import Slice
from tilekern.ir.types import DTYPES, F32, F64
from tilekern.passes.dce import dce
from tilekern.testing.programs import Program, build
from tilekern.testing.programs.batches import Choices, check, sample, script, shrink
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.reduction import reduced
from tilekern.testing.programs.values import Values


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


def test_small_programs_mostly_compute_in_the_floats_that_people_use() -> None:
    class Small(Values):
        small = True

    drawn = Counter(
        d for seed in range(200) for d in Small(Choices(random=Random(seed)), (), tuple(DTYPES.values())).dtypes
    )
    assert drawn[F32] > 80 and drawn[F64] > 80, drawn


def test_slices_start_and_end_anywhere() -> None:
    slices = [
        op
        for seed in range(400)
        for op in sample(seed, features=("elementwise", "shape"))[0].func.walk()
        if isinstance(op, Slice)
    ]
    lengths = [
        (n, low, high)
        for op in slices
        for n, low, high in zip(op.operands[0].tile.shape, op.start, op.stop, strict=True)
    ]
    assert all(0 <= low < high <= n for n, low, high in lengths)
    assert any(low for _, low, _ in lengths) and any(high < n for n, _, high in lengths)


def test_exact_operands_of_a_comparison_are_taken_as_they_are() -> None:
    """A constant stands in only for a value on which backends may differ."""
    taken = Counter[bool]()

    class Counting(Generator):
        def _liked(self, consumer: str) -> Value:
            before = set(self.facts)
            operand = super()._liked(consumer)
            if consumer == "comparison":
                taken[operand in before or self.kinds[operand] != "constant"] += 1
            return operand

    for seed in range(150):
        sample(seed, make=Counting)
    assert taken[True] > taken[False] > 0, taken
