"""`tune`: the setup of a search, for a kernel and for what its gradient runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tilekern import _jax, _machine
from tilekern.blocks.choose import Blocks, BodyError, by_speed, model_of
from tilekern.errors import ArgumentError, TilekernError
from tilekern.ir.core import Func
from tilekern.kernel.composite import called
from tilekern.kernel.file_format import encode
from tilekern.kernel.instance import Instance, Tuning
from tilekern.kernel.interface import of_flat_arrays
from tilekern.kernel.stages import Traced
from tilekern.kernel.tuned import untuned
from tilekern.lower.backend import OPEN
from tilekern.lower.target import TARGETS, Target, backend_of, on_platform, resolve
from tilekern.testing.calls import Call
from tilekern.testing.layouts import known_to
from tilekern.testing.report import Progress
from tilekern.testing.tolerance import in_float64
from tilekern.tuning.candidates import EMITTER, EmitterSpaces, Settings, Space, emitters, given, space, with_emitter
from tilekern.tuning.children import Children
from tilekern.tuning.result import Result, Row
from tilekern.tuning.search import Search
from tilekern.tuning.worker import Setup, call_of

_MOST_CHILDREN = 4
_RANKED = 64  # settings that the model proposes


@dataclass(frozen=True)
class Request:
    """What to tune for.

    Attributes:
      target: the target.
      budget: seconds.
      candidates: those of the user; None to search.
      reference: returns the right results for flat arrays, and a dtype to compute in; None for none.
      progress: True to show the best so far on a terminal.
    """

    target: Target
    budget: float
    candidates: object = None
    reference: Callable[..., Any] | None = None
    progress: bool = True

    @property
    def runs(self) -> bool:
        """True if candidates run on this machine."""
        backend, here = backend_of(self.target), _machine.default_platform()
        return backend.compiles and self.target.platform == here and backend.is_here(self.target)


def target_of(name: str | None) -> Target:
    """The target that a user names; None for that of this machine.

    A target of several emitters leaves the emitter open, unless the name has one, "cuda:sm_90+triton".

    Raises:
      TargetError: there is no such target.
    """
    target = on_platform(_machine.default_platform(), None) if name is None else resolve(name)
    target = replace(target, fallback=TARGETS[target.name].fallback)
    is_open = OPEN in target.emitters and name is not None and "+" not in name
    return replace(target, emitter=OPEN) if is_open else target


def check_budget(budget: object) -> float:
    """The seconds of a budget.

    Raises:
      ArgumentError: it is no number of seconds above 0.
    """
    if isinstance(budget, int | float) and budget > 0:
        return float(budget)
    raise ArgumentError(
        "there is no time to tune",
        expected="a budget of more than 0 seconds",
        got=f"budget = {budget!r}",
        fix="leave it out for 60 seconds",
    )


def tune(
    traced: Callable[[str], tuple[Instance, Sequence[Any]]],
    arguments: Sequence[Any],
    statics: Mapping[str, Any],
    request: Request,
    gradient: bool,
) -> Result:
    """Tune a declared kernel; see `Kernel.tune`.

    Args:
      traced: returns the kernel for a call that names a target, and the arrays that its body closes over.
      arguments: the inputs, arrays or `jax.ShapeDtypeStruct`s.
      statics: the static arguments, for the reference.
      request: what to tune for.
      gradient: True to tune the kernels of the gradient, too.
    """
    end = time.monotonic() + request.budget
    with untuned():
        kernel, captured = traced(request.target.full_name)
        leaves, tree = _jax.flatten(tuple(arguments))
        call = Call(tree, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), statics)
        subject = Subject(kernel, (*leaves, *captured), request, call)
        if not gradient:
            return Result((subject.tuned(end),))
        others = subject.gradient_subjects()
        # As much time for each of them.
        shares = range(1, len(others) + 2)
        now = time.monotonic()
        ends = [now + (end - now) * n / len(shares) for n in shares]
        return Result(tuple(s.tuned(e) for s, e in zip((subject, *others), ends, strict=True)))


def tune_called(kernel: Instance, request: Request, end: float) -> Row:
    """Tune a kernel that a function calls, on random arrays.

    Args:
      kernel: the kernel.
      request: what to tune for.
      end: the time by `time.monotonic` at which the search should end.
    """
    with untuned():
        return Subject(kernel, tuple(kernel.types), request, None).tuned(end)


@dataclass(frozen=True)
class Subject:
    """A kernel, or its derived gradient, that one search tunes.

    Attributes:
      kernel: the kernel.
      leaves: the arrays of the call, flat, and those that the body closes over; types for random arrays.
      request: what to tune for.
      call: the user's call, which a reference can make; None for a kernel that no user calls.
      gradient: True for the derived gradient.
    """

    kernel: Instance
    leaves: tuple[Any, ...]
    request: Request
    call: Call | None
    gradient: bool = False

    def tuned(self, end: float) -> Row:
        """The fastest settings, found until `end`."""
        tuning, target = self._tuning, self.target
        key, choices = tuning.key(target), self._emitters
        own, around = self._around(choices)
        chosen = self.request.candidates if not self.gradient else None
        settings = given(chosen, tuning.signature, choices) if chosen is not None else None
        title = f"{self.kernel.name} on {target.full_name}"
        budget = max(end - time.monotonic(), 0.0)
        bar = Progress(title, round(budget), self.request.progress)

        def progress(best: str) -> None:
            bar.show(round(budget - max(end - time.monotonic(), 0.0)), best)

        with tempfile.TemporaryDirectory(prefix="tilekern-tune-") as name:
            folder = Path(name)
            self._prepare(folder)
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
            with Children(min(_MOST_CHILDREN, cores), folder) as children:
                try:
                    search = Search(
                        self._text, settings or around, own, children, folder,
                        runs=self.request.runs, end=end, progress=progress,
                    )  # fmt: skip
                    outcome = search.run()
                finally:
                    bar.close()
        return Row(key, own, outcome, "measurement" if self.request.runs else "estimate")

    @property
    def target(self) -> Target:
        """The target of the request; its emitter is open only where several emitters may take the kernel."""
        target = self.request.target
        return target if target.emitter != OPEN or self._emitters else replace(target, emitter="")

    @property
    def _emitters(self) -> tuple[str, ...]:
        """The emitters to choose from; none for a derived gradient, whose kernels may want different ones."""
        return () if self.gradient else emitters(self.kernel.func(self.request.target), self.request.target)

    def _around(self, choices: Sequence[str]) -> tuple[Settings, Space | EmitterSpaces]:
        """The schedule's own settings, and the space around them.

        Args:
          choices: the emitters to choose from, the usual one first; () for the target's own.
        """
        if not choices:
            around = self._space(self.target)
            return around.own, around
        usual, *special = choices
        spaces = {usual: self._space(with_emitter(self.target, usual))}
        for emitter in special:
            with suppress(TilekernError):  # the kernel has no blocks for it
                spaces[emitter] = self._space(with_emitter(self.target, emitter))
        served = usual
        with suppress(TilekernError):  # the schedule's own settings are refused
            served = self.kernel.served(self.target)[0].emitter or usual
        return {EMITTER: served, **spaces[served].own}, EmitterSpaces(spaces)

    def _space(self, target: Target) -> Space:
        tuning = self._tuning
        around = space(tuning.signature, tuning.settings(target), tuning.fixed, self.kernel.func(target), target)
        return replace(around, ranked=self._ranked(target, around.own))

    def _ranked(self, target: Target, own: Settings) -> list[Settings]:
        """The settings with the fastest blocks by the model of the target; none for a derived gradient."""
        tuning, model = self._tuning, model_of(target)
        free = [name for name in tuning.signature.blocks if name not in tuning.fixed]
        if model is None or self.gradient or not free:
            return []

        def programs(blocks: Blocks) -> Sequence[Func]:
            try:
                return [tuning.varied({**own, **blocks}, target).func(target)]
            except TilekernError as error:
                raise BodyError from error

        start = {name: int(own[name]) for name in tuning.signature.blocks}
        takes_extents = backend_of(target).takes_extents
        with suppress(BodyError):
            ranked = by_speed(programs, start, free, model, takes_extents=takes_extents)
            return [{**own, **sizes} for sizes in islice(ranked, _RANKED)]
        return []

    @property
    def _tuning(self) -> Tuning:
        tuning = self.kernel.tuning
        if tuning is not None:
            return tuning
        raise ArgumentError(
            f"{self.kernel.name} has no blocks to tune",
            expected="a kernel of a decorated function",
            got="a kernel that was loaded from a file, batched or derived",
            fix="tune the kernel that it was made of",
        )

    def _text(self, settings: Settings) -> str:
        """The kernel with these settings as the text of a file, which loads as a function of flat arrays."""
        target, blocks = self.target, dict(settings)
        if EMITTER in blocks:
            target = with_emitter(target, str(blocks.pop(EMITTER)))
        kernel = self._tuning.varied(blocks, target)
        return encode(kernel, of_flat_arrays(kernel, target), target, [target.full_name])

    def gradient_subjects(self) -> list[Subject]:
        """The kernels of the gradient: the derived one, or those that a stated rule calls."""
        if not self.kernel.derivatives.are_stated:
            return [replace(self, kernel=self._tuning.for_derivatives(), gradient=True)]
        target = self.request.target
        traced = Traced(self.kernel, of_flat_arrays(self.kernel, target), target)
        gradients = call_of(of_flat_arrays(self.kernel, target), gradient=True).function(traced)
        kernels = called(jax.make_jaxpr(gradients)(*self.kernel.types), target)
        request = replace(self.request, candidates=None, reference=None)
        return [
            Subject(kernel, tuple(kernel.types), request, None)
            for kernel, _ in kernels
            if kernel.tuning is not None and kernel.name != self.kernel.name
        ]

    # --- what the processes need ---

    def _prepare(self, folder: Path) -> None:
        """Write the setup, the arrays of `leaves` and the results of the reference to a folder."""
        runs, reference = self.request.runs, self.request.reference
        has_numbers = [not isinstance(x, jax.ShapeDtypeStruct) for x in self.leaves]
        for number, (leaf, is_given) in enumerate(zip(self.leaves, has_numbers, strict=True)):
            if is_given:
                np.asarray(leaf).tofile(folder / f"argument-{number}")
        names = [p.name for p in self.kernel.func(self.target).inputs]
        extents = {n: np.asarray(x).tolist() for n, x in zip(names, self.leaves, strict=False) if _is_extent(x)}
        uses_reference = runs and reference is not None and self.call is not None
        estimates = not runs or self.request.target.platform == "cpu"
        setup = Setup(_jax.settings().x64, self.gradient, runs, estimates, extents, has_numbers, uses_reference)
        setup.save(folder)
        if uses_reference and reference is not None and self.call is not None:
            _write_reference(replace(self.call, gradient=self.gradient), reference, self.leaves, self.kernel, folder)


def _is_extent(leaf: Any) -> bool:
    """True for an array of integers, whose values may decide how often a loop runs; False for a type."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and np.issubdtype(leaf.dtype, np.integer)


def _write_reference(
    call: Call, reference: Callable[..., Any], leaves: Sequence[Any], kernel: Instance, folder: Path
) -> None:
    """Write the results of a reference, in float64 and in the dtype of the inputs.

    Raises:
      ArgumentError: they have other shapes than the kernel's.
    """
    numbers = [
        r if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x) for r, x in zip(call.arrays, leaves, strict=False)
    ]
    oracle = in_float64(call.function(reference, known_to(reference, call.keywords)), *numbers)
    keywords = known_to(reference, {**call.keywords, "dtype": call.dtype})
    low = call.function(reference, keywords)(*[jax.device_put(x) for x in numbers])
    outputs = list(kernel.outputs)
    if call.gradient:
        outputs = [t for t in call.types if np.issubdtype(t.dtype, np.floating)]
    shapes, right = [tuple(x.shape) for x in low], [tuple(x.shape) for x in outputs]
    if shapes != right:
        raise ArgumentError(
            "the reference gives other shapes than the kernel",
            expected=", ".join(map(str, right)),
            got=", ".join(map(str, shapes)) or "no results",
            fix="give a reference that returns the same arrays in the same order",
        )
    for number, (wide, result, output) in enumerate(zip(oracle, low, outputs, strict=True)):
        np.asarray(wide).astype(np.float64).tofile(folder / f"oracle-{number}")
        np.asarray(result).astype(output.dtype).tofile(folder / f"low-{number}")
