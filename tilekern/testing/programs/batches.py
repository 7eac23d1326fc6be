"""Thousands of random programs against a backend that takes many at once, and the simplest one that fails.

A compiler spends its time per call, so a backend compiles a whole batch as one function. What fails is made simpler
program by program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import batched
from random import Random
from typing import Any

from tilekern.testing.programs import Program, assert_agrees, build
from tilekern.testing.programs.reduction import reduced

# From programs to the outputs of each.
type ProgramRunner = Callable[[Sequence[Program]], Sequence[Sequence[Any]]]

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


def check(seeds: Iterable[int], run: ProgramRunner, **options: Any) -> None:
    """Assert that a backend agrees with the interpreter on the programs of `seeds`.

    Raises:
      AssertionError: with a simple program for which it does not, or on which it fails.
    """
    for batch in batched(seeds, _BATCH):
        samples = [sample(seed, **options) for seed in batch]
        try:
            results = run([program for program, _ in samples])
            for (program, _), outputs in zip(samples, results, strict=True):
                assert_agrees(program, outputs)
        except Exception as error:
            for seed, (program, choices) in zip(batch, samples, strict=True):
                if (problem := problem_of(program, run)) is not None:
                    smallest = simplest(choices, run, problem, options)
                    raise AssertionError(f"seed {seed}: {message(smallest, run)}") from error
            raise  # only all of them together fail


def problem_of(program: Program, run: ProgramRunner) -> Exception | None:
    """The error that a backend raises for a program, or that its outputs are; None if all is well."""
    try:
        assert_agrees(program, run([program])[0])
    except Exception as error:
        return error
    return None


def message(program: Program, run: ProgramRunner) -> str:
    """The first line of a program's problem, and a script that runs the program again."""
    first, *_ = str(problem_of(program, run)).splitlines() or [""]
    return f"{first}\n\n{script(program, run)}"


def script(program: Program, run: ProgramRunner) -> str:
    """A Python script that runs a program on a backend, and fails if the outputs are not the interpreter's.

    A backend that has no name in a module, such as a lambda, is left to the reader to fill in.
    """
    imports = ["from tilekern.ir.parse import parse", "from tilekern.testing.programs import Program, assert_agrees"]
    function = run.func if isinstance(run, partial) else run
    name, module = getattr(function, "__qualname__", "<none>"), getattr(function, "__module__", "")
    if name.isidentifier() and module:
        imports.append(f"from {module} import {name}")
        keywords = run.keywords if isinstance(run, partial) else {}
        arguments = ", ".join(["[program]", *(f"{key}={value!r}" for key, value in keywords.items())])
        last = f"assert_agrees(program, {name}({arguments})[0])"
    else:
        last = "assert_agrees(program, ...)  # for the dots: the outputs on the backend of the test"
    return "\n".join([*imports, f"program = {program!r}", last])


def simplest(choices: list[int], run: ProgramRunner, problem: Exception, options: Mapping[str, Any]) -> Program:
    """A simple program with a problem of the same class."""

    def fails(program: Program) -> bool:
        return type(problem_of(program, run)) is type(problem)

    return reduced(shrink(choices, fails, **options), fails)


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
