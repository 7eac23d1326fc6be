"""Proof that kernels compute the same function on every backend: random calls, one rule for errors, a report.

from tilekern import testing

print(testing.check(my_kernel, my_reference))
"""

from tilekern.testing.benchmark import Benchmark, benchmark
from tilekern.testing.calls import Call
from tilekern.testing.check import CheckError, check, compare, given_arguments
from tilekern.testing.comparison import Disagreement
from tilekern.testing.programs import FEATURES, Program, assert_agrees
from tilekern.testing.report import Report
from tilekern.testing.strategies import arrays, dtypes, lengths, programs, shapes
from tilekern.testing.tolerance import assert_close, bound_of, in_float64
from tilekern.testing.values import NUMBERS, values

__all__ = [
    "FEATURES",
    "NUMBERS",
    "Benchmark",
    "Call",
    "CheckError",
    "Disagreement",
    "Program",
    "Report",
    "arrays",
    "assert_agrees",
    "assert_close",
    "benchmark",
    "bound_of",
    "check",
    "compare",
    "dtypes",
    "given_arguments",
    "in_float64",
    "lengths",
    "programs",
    "shapes",
    "values",
]
