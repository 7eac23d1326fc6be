"""`check`: random calls of a kernel, on every backend, against each other and a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.lower.target import BACKENDS, backend_of, resolve
from tilekern.testing.calls import Call
from tilekern.testing.comparison import Comparison
from tilekern.testing.report import Progress, Report
from tilekern.testing.simulation import HERE, INTERPRETER, MESH
from tilekern.testing.space import Space, space

# Checks of Hypothesis that would call slow backends, and arguments that do not fit, a fault of the test.
_UNWANTED = ("too_slow", "filter_too_much", "data_too_large", "large_base_example")


def by_default() -> list[str]:
    """One target of each backend; an ordinary call, on this machine's GPU or TPU if it has one; and all its devices."""
    return [*(backend.checked.name for backend in BACKENDS.values()), HERE, MESH]


def available(targets: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The targets that run here, natively or interpreted; and why others do not.

    Raises:
      TargetError: there is no such target.
    """
    runs: list[str] = []
    skipped: dict[str, str] = {}
    for name in by_default() if targets is None else targets:
        if name == MESH and jax.device_count() == 1:
            if targets is not None:
                skipped[name] = "needs several devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8"
            continue
        backend = None if name in (HERE, MESH, INTERPRETER) else backend_of(resolve(name))
        if backend is not None and not backend.interprets:
            skipped[name] = f"needs {backend.package}: pip install {backend.package}"
        else:
            runs.append(name)
    return runs, skipped


class CheckError(AssertionError):
    """A check found a wrong result.

    Attributes:
      call: the simplest call found for which it is wrong.
      script: a program that makes the call again.
      report: of the calls before.
    """

    def __init__(self, message: str, call: Call, script: str, report: Report) -> None:
        super().__init__(f"{message}\n\nThe call: {call}\n\nTo make it again:\n\n{script}\n{report}")
        self.call, self.script, self.report = call, script, report


def check(
    kernel: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    *,
    targets: Sequence[str] | None = None,
    cases: Sequence[Any] | None = None,
    max_examples: int = 40,
    seed: int | None = None,
    batches: bool = True,
    gradients: bool = True,
    progress: bool = True,
    **keywords: Any,
) -> Report:
    """Check that a kernel computes the same function on every backend, and the function of a reference.

    Random calls are drawn: shapes that are awkward for tiles, dtypes, blocks, static arguments, numbers of all kinds,
    batches of `jax.vmap`, gradients. Each runs in the interpreter, which finds races and elements that are not
    stored, and on every target: CPUs by their machine code, "cuda:…" in Triton's interpreter and "tpu:…" in that of
    Pallas, "here" by an ordinary call on this machine's default device, "mesh" by one on all its devices, if there are
    several. Each result is compared with the same in float64, of the reference or of the kernel itself, by the rule of
    `assert_close`; integers must be equal. Gradients are also compared with forward mode and with differences.

    Args:
      kernel: a kernel, an op, or a function of arrays that calls some.
      reference: the same function in plain JAX or NumPy, with the same positional parameters. It gets those keywords
        that it has parameters for, and `dtype`, if it has that, to compute in.
      targets: names of targets, and "here"; by default one of each backend.
      cases: tuples of arrays or `jax.ShapeDtypeStruct`s that the kernel takes. By default ranks and dtypes are found
        by trial. Either way it is found which dims must have one size; calls have other sizes, too.
      max_examples: the number of calls.
      seed: another one gives other calls.
      batches: whether calls are batched by `jax.vmap`.
      gradients: whether calls are differentiated.
      progress: whether a terminal shows a progress bar.
      **keywords: static arguments and blocks, which are not drawn then.

    Returns:
      A report that prints as a table: for each target and dtype the number of calls, and the worst error in units of
      what the rule allows. "refused" counts calls that a target does not take, "unsteady" elements that a change of the
      inputs in the last place moves by more than the rule allows, and which were compared with that.

    Raises:
      CheckError: with the simplest call found for which a result is wrong, and a script that makes it again.
      tilekern.errors.ArgumentError: no arguments are found that the kernel takes; or the reference gives other shapes.

    Example:
      >>> import jax, tilekern as tk
      >>> from tilekern import testing
      >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
      ... def double(x, out, *, block: tk.Block = 128):
      ...     i = tk.parallel(x.shape[0], block)
      ...     out[i] = x[i] * 2
      >>> report = testing.check(double, lambda x: 2 * x, targets=["cpu:xla"], max_examples=5)
      >>> report.targets
      ('interpreter', 'cpu:xla')
    """
    drawn = space(kernel, reference, cases, keywords, batches=batches, gradients=gradients)
    return check_calls(kernel, reference, drawn, targets, max_examples, seed, progress)


def check_calls(
    kernel: Callable[..., Any],
    reference: Callable[..., Any] | None,
    drawn: Space,
    targets: Sequence[str] | None,
    max_examples: int,
    seed: int | None,
    progress: bool = False,
) -> Report:
    """Check a kernel by calls of a space; see `check`."""
    places, skipped = available(targets)
    name = str(getattr(kernel, "__name__", kernel))
    report, bar = Report(name, skipped=skipped), Progress(name, max_examples, progress)
    failed: list[tuple[Call, Exception]] = []
    wrong: list[ArgumentError] = []  # of the reference, whatever the call: Hypothesis need not look for a simpler one

    def one(call: Call) -> None:
        if wrong:
            return
        bar.show(report.examples, str(call))
        try:
            outcomes = Comparison(kernel, call, reference).all(places)
        except ArgumentError as error:
            wrong.append(error)
            return
        except Exception as error:
            failed.append((call, error))
            raise
        if not failed:
            report.add(outcomes)

    try:
        _run(one, drawn.strategy(report.rejected), max_examples, seed)
    except Exception:
        if not failed:
            raise
        raise _error(kernel, reference, failed[-1], places, report) from failed[-1][1]
    finally:
        bar.close()
    if wrong:
        raise wrong[0]
    if not report.examples:
        raise _nothing(name, report)
    return report


def _run(one: Callable[[Call], None], strategy: Any, max_examples: int, seed: int | None) -> None:
    """Run Hypothesis: the same calls in each run, for a seed."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded

    options = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        # `CheckError` shows no explanation, for which Hypothesis would trace each line and run more calls.
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=[HealthCheck[name] for name in _UNWANTED],
    )
    test = options(given(strategy)(one))
    (test if seed is None else seeded(seed)(test))()


def _error(
    kernel: Any, reference: Any, failed: tuple[Call, Exception], places: Sequence[str], report: Report
) -> CheckError:
    call, error = failed
    where = getattr(error, "where", None)
    script = call.script(kernel, places if where is None else [where], reference)
    summary = str(error) if where is not None else f"{type(error).__name__}: {error}"
    return CheckError(f"{report.name} on {summary}" if where else f"{report.name}: {summary}", call, script, report)


def _nothing(name: str, report: Report) -> ArgumentError:
    common = "; ".join(f"{why} ({count} times)" for why, count in report.rejected.most_common(2))
    return ArgumentError(
        f"no example satisfies {name}",
        expected="a kernel that takes some of the random calls",
        got=common or "no calls",
        fix="give cases of arguments that it takes, or static arguments by keyword",
    )


def compare(
    kernel: Callable[..., Any],
    *arguments: Any,
    reference: Callable[..., Any] | None = None,
    targets: Sequence[str] | None = None,
    in_axes: Any = None,
    gradient: bool = False,
    seed: int = 0,
    **keywords: Any,
) -> Report:
    """Compare one call on every backend, as `check` does with random ones.

    Args:
      kernel: a kernel, an op, or a function of arrays that calls some.
      *arguments: its positional arguments: pytrees of arrays.
      reference: the same in plain JAX, see `check`.
      targets: names of targets, and "here".
      in_axes: for each array the dim that `jax.vmap` maps over, or None; left out: there is no vmap.
      gradient: True for the gradient by the arrays of floats.
      seed: of the cotangents.
      **keywords: static arguments and blocks.

    Raises:
      AssertionError: a result is wrong.
    """
    leaves, tree = _jax.flatten(arguments)
    arrays = tuple(np.asarray(x) for x in leaves)
    axes = None if in_axes is None else tuple(in_axes)
    sizes = {x.shape[a] for x, a in zip(arrays, axes or (), strict=False) if a is not None}
    types = [
        jax.ShapeDtypeStruct(x.shape if a is None else (*x.shape[:a], *x.shape[a + 1 :]), x.dtype)
        for x, a in zip(arrays, axes or [None] * len(arrays), strict=True)
    ]
    call = Call(tree, tuple(types), keywords, in_axes=axes, size=min(sizes, default=1), gradient=gradient, seed=seed)
    call.__dict__["arrays"] = arrays
    places, skipped = available(targets)
    report = Report(str(getattr(kernel, "__name__", kernel)), skipped=skipped)
    report.add(Comparison(kernel, call, reference).all(places))
    return report


def given_arguments(
    kernel: Callable[..., Any], *, cases: Sequence[Any] | None = None, batches: bool = False, **keywords: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of tests, as `hypothesis.given`: the test gets random calls of a kernel, as its last argument.

    A `Call` has `.arguments` and `.keywords`, so that `kernel(*call.arguments, **call.keywords)` makes it.
    """
    drawn = space(kernel, None, cases, keywords, batches=batches, gradients=False)
    calls = drawn.strategy()
    from hypothesis import given

    return given(calls)
