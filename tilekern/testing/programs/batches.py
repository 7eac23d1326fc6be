"""Thousands of random programs against a backend that takes many at once, and the simplest one that fails.

A compiler spends its time per call, so a backend compiles a whole batch as one function. What fails is made simpler
program by program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import batched
from random import Random
from typing import Any

from tilekern.ir.core import Op, Value
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.rewrite import Rewriter
from tilekern.passes.dce import dce
from tilekern.testing.programs import Program, assert_agrees, build

# From programs to the outputs of each.
Backend = Callable[[Sequence[Program]], Sequence[Sequence[Any]]]

_BATCH = 50
# How many simpler programs are tried at most, and for how many seconds.
_ATTEMPTS, _SECONDS = 400, 60.0


class Choices:
    """Choices on record: the given ones, behind them random ones, or zeros without a generator."""

    def __init__(self, given: Sequence[int] = (), random: Random | None = None) -> None:
        self.made: list[int] = []
        self._given, self._random = given, random

    def __call__(self, most: int) -> int:
        number = len(self.made)
        if number < len(self._given):
            choice = min(self._given[number], most)
        else:
            choice = self._random.randint(0, most) if self._random else 0
        self.made.append(choice)
        return choice


def sample(seed: int, **options: Any) -> tuple[Program, list[int]]:
    """The random program of a seed, and the choices that make it; `options` are those of `programs`."""
    choices = Choices(random=Random(seed))
    return build(choices, **options), choices.made


def check(seeds: Iterable[int], backend: Backend, **options: Any) -> None:
    """Assert that a backend agrees with the interpreter on the programs of `seeds`.

    Raises:
      AssertionError: with a simple program for which it does not, or on which it fails.
    """
    for batch in batched(seeds, _BATCH):
        samples = [sample(seed, **options) for seed in batch]
        try:
            results = backend([program for program, _ in samples])
            for (program, _), outputs in zip(samples, results, strict=True):
                assert_agrees(program, outputs)
        except Exception as error:
            for seed, (program, choices) in zip(batch, samples, strict=True):
                if (problem := problem_of(program, backend)) is not None:
                    smallest = simplest(choices, backend, problem, options)
                    shown = f"{problem_of(smallest, backend)!r}\n{smallest!r}"
                    raise AssertionError(f"seed {seed}: {shown}") from error
            raise  # only all of them together fail


def problem_of(program: Program, backend: Backend) -> Exception | None:
    """The error that a backend raises for a program, or that its outputs are; None if all is well."""
    try:
        assert_agrees(program, backend([program])[0])
    except Exception as error:
        return error
    return None


def simplest(choices: list[int], backend: Backend, problem: Exception, options: Mapping[str, Any]) -> Program:
    """A simple program with a problem of the same class."""

    def fails(program: Program) -> bool:
        return type(problem_of(program, backend)) is type(problem)

    program = shrink(choices, fails, **options)
    for output in program.func.outputs:
        smaller = without(program, output)
        program = smaller if smaller is not None and fails(smaller) else program
    return program


def shrink(choices: list[int], fails: Callable[[Program], bool], **options: Any) -> Program:
    """A simpler program that fails too."""
    return smaller(choices, partial(build, **options), fails)


def smaller[T](choices: list[int], make: Callable[[Choices], T], fails: Callable[[T], bool]) -> T:
    """What simpler choices make that fails too: choices are left out or made 0 as long as that goes."""
    tried: set[tuple[int, ...]] = set()
    end = time.monotonic() + _SECONDS

    def attempt(candidate: list[int]) -> bool:
        if tuple(candidate) in tried or len(tried) >= _ATTEMPTS or time.monotonic() > end:
            return False
        tried.add(tuple(candidate))
        return fails(make(Choices(candidate)))

    size = len(choices)
    while size := size // 2:
        at = 0
        while at < len(choices):
            before, after = choices[:at], choices[at + size :]
            zeros = [0] * len(choices[at : at + size])
            if attempt([*before, *after]):
                choices = [*before, *after]
                continue
            if attempt([*before, *zeros, *after]):
                choices = [*before, *zeros, *after]
            at += size
    return make(Choices(choices))


def without(program: Program, output: Value) -> Program | None:
    """The program without an output, unless it is read."""
    func = program.func
    if any(isinstance(op, Load) and op.ref is output for op in func.walk()) or output.ref.role == "inout":
        return None

    def rule(op: Op, _: Rewriter) -> Sequence[Value] | None:
        return () if isinstance(op, MemoryOp) and op.ref is output else None

    kept = [(p, t) for p, t in zip(func.outputs, program.tolerances, strict=True) if p is not output]
    params = (*(p for p in func.params if p is not output),)
    smaller = dce(replace(Rewriter(rule).run(func), params=params))
    return Program(smaller, program.seed, tuple(t for _, t in kept))
