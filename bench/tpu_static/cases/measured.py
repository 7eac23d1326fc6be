"""Cases of a kernel beside formulas in `jnp`, all on the same arrays: forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench.tpu_static.cases.case import Case

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A program that a child process compiles.

    Attributes:
      fn: the function.
      args: its arguments; NumPy arrays become constants.
      donated: the numbers of the arguments that it may overwrite.
    """

    fn: Function
    args: Arguments
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Measured(Case):
    """A kernel and formulas on the same arrays.

    Attributes:
      title: the name.
      kernel: our function; it takes `target`.
      arguments: makes the types of the arguments, and NumPy arrays where values decide how much is computed.
      formulas: the peers' functions, by "peer setting". Each takes the kernel's arguments and returns its results.
      operations: the operations of the products, see `flops`.
      dtype: the dtype of the products' operands.
      pulled: the numbers of the arguments whose gradients are computed, too; () for the forward pass alone.
      donated: the numbers of the arguments that results may overwrite.
      alone: True if the formulas only define the results, because they take too long to compile.
    """

    title: str
    kernel: Function
    arguments: Callable[[], Arguments]
    formulas: dict[str, Function]
    operations: int = 0
    dtype: str = "bfloat16"
    pulled: tuple[int, ...] = ()
    donated: tuple[int, ...] = field(default=(), kw_only=True)
    alone: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """The name."""
        return self.title

    @property
    def flops(self) -> int:
        """Operations of the products that the results need."""
        return self.operations

    @property
    def operands(self) -> str:
        """The dtype of the products' operands."""
        return self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the arguments and the results; with gradients, the forward pass's results count, too."""
        program = self.program(next(iter(self.formulas)), "")
        results = jax.eval_shape(program.fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.args))
        return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves((program.args, results)))

    def ours(self, chip: str) -> str:
        """The program of our kernel."""
        return _source(self.title, "tilekern", chip)

    def peers(self) -> Mapping[str, str]:
        """The programs of the formulas."""
        return {} if self.alone else {setting: _source(self.title, setting, "") for setting in self.formulas}

    def program(self, contestant: str, chip: str) -> Program:
        """The program of a child: "tilekern" for our kernel, or a key of `formulas`."""
        functions = self.formulas | {"tilekern": partial(self.kernel, target=f"tpu:{chip}")}
        function, arguments = functions[contestant], self.arguments()
        if not self.pulled:
            return Program(function, arguments, self.donated)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
        results = jax.eval_shape(next(iter(self.formulas.values())), *shapes)
        cotangents = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(results))
        return Program(_with_gradient(function, self.pulled, len(arguments)), (*arguments, *cotangents))


def with_gradient(case: Measured, pulled: tuple[int, ...], operations: int | None = None) -> tuple[Measured, Measured]:
    """A case, and the case of its forward and backward pass; None for three times its operations."""
    operations = 3 * case.operations if operations is None else operations
    return case, replace(case, title=f"{case.title} + gradient", pulled=pulled, operations=operations)


def types(make: Callable[[], Any]) -> Callable[[], Arguments]:
    """The types of the arrays that `make` would make."""
    return lambda: tuple(jax.tree.leaves(jax.eval_shape(make)))


def _with_gradient(function: Function, pulled: tuple[int, ...], count: int) -> Function:
    """A function (*arguments, *cotangents) -> (the results of `function`, the gradients by the arguments `pulled`).

    `count` is the number of the arguments.
    """

    def run(*operands: Any) -> Any:
        arguments, cotangents = operands[:count], operands[count:]

        def of_some(*some: Any) -> Any:
            replaced = list(arguments)
            for number, x in zip(pulled, some, strict=True):
                replaced[number] = x
            return function(*replaced)

        out, pull = cast(Any, jax.vjp(of_some, *(arguments[number] for number in pulled)))
        return out, pull(cotangents if isinstance(out, tuple) else cotangents[0])

    return run


def _source(case: str, contestant: str, chip: str) -> str:
    return (
        "from bench.tpu_static.cases import program\n"
        f"made = program({case!r}, {contestant!r}, {chip!r})\n"
        "fn, args, donated = made.fn, made.args, made.donated\n"
    )
