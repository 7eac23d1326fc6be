"""Every error that tilekern raises, and the one form they take.

    tilekern.errors.IndexingError: an index of a ref must be a Tile, an integer, a slice, tk.ds or an index vector
      expected: a Tile, an integer scalar, `:`, tk.ds(start, size) or an integer vector
      got: index 1 = 2.5 (float)
      fix: use an integer position
      at /home/me/model.py:14 in scores
         14 |     s = x[i, 2.5]
            |         ^^^^^^^^^

Errors find the user's line by themselves (`source.current`). `assert` is for bugs of the compiler, never for input.
"""

from __future__ import annotations

import warnings
from typing import Any

from tilekern import source


class TilekernError(Exception):
    """Base of all tilekern errors.

    Attributes:
      summary: one sentence that says what is wrong.
      expected, got, fix: what was wanted, what came (`name=value`), what to do instead; "" where not known.
      loc: the user's line.
    """

    def __init__(self, summary: str, *, expected: str = "", got: str = "", fix: str = "") -> None:
        self.summary, self.expected, self.got, self.fix = summary, expected, got, fix
        self.loc = source.current()
        super().__init__(summary)

    def __str__(self) -> str:
        lines = [self.summary]
        details = (("expected", self.expected), ("got", self.got), ("fix", self.fix))
        lines += [f"  {label}: {text}" for label, text in details if text]
        if self.loc is not source.UNKNOWN:
            lines.append(f"  at {self.loc}" + (f" in {self.loc.function}" if self.loc.function else ""))
            lines += [f"  {line}" for line in self.loc.snippet().splitlines()]
        return "\n".join(lines)


# --- what the user wrote -------------------------------------------------------------------------------------------


class ArgumentError(TilekernError, TypeError, ValueError):
    """A kernel was called, traced or declared with arguments that do not fit it."""


class TraceError(TilekernError, TypeError):
    """The body of a kernel does something that cannot be traced to tile code."""


class UnsupportedError(TraceError):
    """An operation of JAX that the language does not have (yet)."""


class IndexingError(TraceError):
    """An index of a ref is of the wrong kind, dtype, rank or size."""


class TileScopeError(TraceError):
    """A Tile or an index was used outside the fold or the kernel that made it."""


class CarryError(TraceError):
    """A loop's body returned what does not fit its initial value, or a branch what does not fit the other's."""


class ConcreteValueError(TraceError):
    """Python code asked for the concrete value of a traced one (`if x > 0`, `int(x)`)."""


class OutputError(TraceError):
    """Outputs disagree with the kernel's `out_type`."""


class TargetError(TilekernError, ValueError):
    """A target is unknown, or has no backend here."""


class ResourceError(TilekernError, ValueError):
    """A kernel needs more of the target's memory or threads than one program may have."""


class NotDifferentiableError(TilekernError, NotImplementedError):
    """An operation, an access or a loop of a kernel has no derivative, or a rule that is needed is not stated."""


class NotBatchableError(TilekernError, NotImplementedError):
    """A kernel, or an access inside it, has no batching rule."""


class FallbackWarning(UserWarning):
    """A call runs on the portable backend, for the platform's own one refuses it."""


class GatherWarning(UserWarning):
    """Each of several devices computes a whole call, for which XLA gathers arrays that a mesh divides."""


class LargeProgramWarning(UserWarning):
    """A kernel becomes a program that takes the target's compiler minutes."""


# --- what a backend stands on ----------------------------------------------------------------------------------------


class DependencyError(TilekernError, ImportError):
    """A package that the target's backend needs is missing, or not of a version that works."""


class CompileError(TilekernError, RuntimeError):
    """The compiler below the backend failed on the code that the backend wrote."""


# --- what the interpreter found in a running kernel -----------------------------------------------------------------


class InterpreterError(TilekernError):
    """Base of the faults that only the interpreter sees; `loc` is the line of the access."""


class OutOfBoundsError(InterpreterError):
    """An access that was proved to be in bounds was not: a bug of the compiler."""


class UnwrittenError(InterpreterError):
    """An element of an output was never stored, or was loaded before it was stored."""


class WriteConflictError(InterpreterError):
    """Two programs stored the same element."""


class DeviceAssertionError(InterpreterError):
    """A `tk.device_assert` does not hold."""


class OrderDependenceError(InterpreterError):
    """The result depends on the order in which programs run."""


# --- bugs of the compiler -------------------------------------------------------------------------------------------


class VerifyError(TilekernError):
    """A Func breaks a rule of the block IR: a bug of the compiler, or a Func built wrongly by hand."""


class ParseError(TilekernError, ValueError):
    """A text is not the text form of a Func."""


class LoadError(TilekernError, ValueError):
    """A file is not that of a saved kernel, was changed, or is of a newer version."""


# --- old names, until the next version --------------------------------------------------------------------------------

_OLD = ("OutOfBounds", "Unwritten", "WriteConflict", "OrderDependence", "DeviceAssertion")


def __getattr__(name: str) -> Any:
    """The class of an old name, with a DeprecationWarning."""
    if name not in _OLD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"tilekern.errors.{name} is now {name}Error", DeprecationWarning, stacklevel=2)
    return globals()[f"{name}Error"]
