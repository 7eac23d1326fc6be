"""The compared cases, a module for each family of kernels.

case        the parts of every case
attention   attention, its backward pass and decoding
measured    a kernel and `jnp` formulas on the same arrays, forward or with gradient
products    matrix products; `grouped`: products of groups of rows
rows        softmax, norms and the step of AdamW
recurrences linear attention, delta rules, scans and convolutions
losses      cross entropy and distillation
"""

from bench.tpu_static.cases import attention, grouped, losses, products, recurrences, rows
from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Measured, Program

CASES: tuple[Case, ...] = (
    *attention.CASES,
    *products.CASES,
    *rows.CASES,
    *grouped.CASES,
    *recurrences.CASES,
    *losses.CASES,
)

SMALL: tuple[Case, ...] = (
    *attention.SMALL,
    *products.SMALL,
    *rows.SMALL,
    *grouped.SMALL,
    *recurrences.SMALL,
    *losses.SMALL,
)
"""The cases of the golden cycles."""


def program(case: str, contestant: str, chip: str) -> Program:
    """The function and the arguments of a contestant in a `Measured` case, which a child process compiles."""
    (match,) = {c for c in (*CASES, *SMALL) if isinstance(c, Measured) and c.name == case}
    return match.program(contestant, chip)


__all__ = ["CASES", "SMALL", "Case", "program"]
