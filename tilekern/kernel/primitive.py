"""`kernel_call_p`, the JAX primitive: one call of a kernel or an op in a JAX program. Its parameter is a `Callee`.

The program that runs, with its blocks, is chosen when the call is lowered: only then the platform is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

import jax

from tilekern import _jax, _meshes
from tilekern.ir.records import record
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.target import Target

# The jitted program of a call for a target, and how XLA's partitioner treats it.
type Program = tuple[Callable[..., Sequence[jax.Array]], Partitioning]

# The kernels of a call, each with its target.
type Calls = list[tuple[Any, Target]]

type Types = Sequence[jax.ShapeDtypeStruct]

# For each operand the dim along which it is stacked; None for an operand that all calls share.
type Dims = tuple[int | None, ...]

_ENTRIES = 256


class Elements(NamedTuple):
    """Proofs that the elements along dims of a call's operands are independent of each other.

    Attributes:
      part: as `Divisible.part`, of names whose elements are independent: each element of a result depends on the
        elements of the operands at its own place alone, whatever the tiles are.
      whole: returns the reason why a dim of an operand has no name that may be divided, by their numbers.
    """

    part: Callable[[Mapping[str, int]], Callee | str]
    whole: Callable[[int, int], str]


class Divisible(NamedTuple):
    """A sharding rule, by which each device computes its parts of the results from its parts of the operands.

    Attributes:
      rule: returns the rule by the accesses alone, by which a part may lack a proof; None if no rule is known.
      part: returns the callee on parts of the operands, by the number of equal parts that devices have of each factor
        of the rule; or, as a str, the reason why it is not proved to compute parts.
      elements: proofs about single elements; None for a callee that is no call of a declared kernel.
      instead_of_gathers: as in the `Rules` of the kernel.
    """

    rule: Callable[[], ShardingRule | None]
    part: Callable[[Mapping[str, int]], Callee | str]
    elements: Elements | None = None
    instead_of_gathers: str = ""


@record(eq=False, kw_only=True, repr=False)
class Callee(ABC):
    """What a call runs, for arguments of given types: an `Instance` or a `Composite`.

    Attributes:
      name: the name of the kernel or op.
      asked: the target that the call names; None for the best target of the platform it is lowered for.
      target: the target that stands for the callee where no platform is known yet.
      outputs: the types of the results.
      divisible: the sharding rule; None if the operations of a JAX function are divided by their own rules.
    """

    name: str
    asked: Target | None
    target: Target
    outputs: Types
    divisible: Divisible | None
    _cache: _jax.Cache[tuple[Any, ...], Any] = field(default_factory=lambda: _jax.Cache(_ENTRIES), init=False)

    def __repr__(self) -> str:
        return self.name

    def once[T](self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of `make`, cached by a key: the kind of the result, then the values that it depends on."""
        value = self._cache.get(key)
        if value is None:
            self._cache[key] = value = make()
        return value

    @abstractmethod
    def program(self, target: Target) -> Program:
        """The jitted program for a target."""

    @abstractmethod
    def on_mesh(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        """The function for a target of operands that explicit axes of a mesh divide, to be traced inside the mesh."""

    def program_on_mesh(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program for a target of operands that explicit axes of a mesh divide."""
        return self.once(("program on mesh", target), lambda: jax.jit(self.on_mesh(target)))

    @abstractmethod
    def kernels(self, target: Target, operands: Types) -> Calls:
        """The kernels that a call for a target runs, in the order in which their calls begin."""

    @abstractmethod
    def calls_host(self, target: Target) -> bool:
        """True if a call prints, or checks assertions, which the host may have to do."""

    # --- rules of JAX ---

    @abstractmethod
    def batched(self, size: int, dims: Dims) -> tuple[Callee, Dims]:
        """The callee of `size` calls at once, operand number n stacked along `dims[n]`.

        All results are stacked along dim 0. Operands must be stacked along the dims returned with the callee, which
        differ from `dims` only where a shared operand has to be stacked.
        """

    @abstractmethod
    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The results and their tangents; a tangent that is zero is None, in arguments and results."""

    @abstractmethod
    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        """For each operand that is a `jax.ShapeDtypeStruct`, its cotangent, or None for zeros; else None.

        The results are linear in such operands, taken together. None in `cotangents` stands for zeros.
        """

    # --- sharding ---

    @cached_property
    def rule(self) -> ShardingRule | None:
        """The sharding rule by the accesses alone, by which a `part` may lack a proof; None if no rule is known."""
        return None if self.divisible is None else self.divisible.rule()

    def part(self, parts: Mapping[str, int]) -> Callee | str:
        """The callee on parts of the operands, or the reason why it is not proved; see `Divisible.part`."""
        divisible = self.divisible
        if not parts or divisible is None:
            return self
        return self.once(("part", *sorted(parts.items())), lambda: divisible.part(parts))

    @property
    def sharding(self) -> ShardingRule | None:
        """The rule without the names whose least number of parts is not proved; None if no rule is known."""
        rule = self.rule
        if rule is None or not isinstance(self.part(rule.least_parts(rule.sizes)), str):
            return rule
        for name in rule.sizes:
            part = self.part(rule.least_parts([name]))
            rule = rule.without(name, part) if isinstance(part, str) else rule
        return rule


def _types(*operands: _jax.ShapedArray, callee: Callee) -> list[_jax.ShapedArray]:
    if any(map(_meshes.is_divided, operands)):
        return _meshes.types_of(callee.program_on_mesh(callee.target), operands)
    return _meshes.result_types(kernel_call_p.name, operands, callee.outputs)


kernel_call_p = _jax.primitive("tilekern_call", _types, multiple_results=True)
_jax.forget_parameters(kernel_call_p)


def bind(callee: Callee, *operands: Any) -> list[Any]:
    """The results of a call on operands that no explicit axis divides, or of a function that is traced in the mesh."""
    return _jax.bind(kernel_call_p, *_meshes.alike(operands), callee=callee)


def calls_in(jaxpr: _jax.Jaxpr) -> list[tuple[Any, list[jax.ShapeDtypeStruct]]]:
    """The callees of a jaxpr, in order, with the types of the operands; calls in nested jaxprs count."""
    calls: list[Any] = [eqn for eqn in _jax.equations(jaxpr) if eqn.primitive is kernel_call_p]
    return [(e.params["callee"], [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.invars]) for e in calls]


# Runs a call outside of jit, in the place of XLA.
type Runner = Callable[[Any, Sequence[Any]], Sequence[Any]]

runner: ContextVar[Runner | None] = ContextVar("tilekern_runner", default=None)
"""The runner of `calls_run_by`; None outside of it."""


@contextmanager
def calls_run_by(run: Runner) -> Generator[None]:
    """A context in which `run(callee, operands)` runs all calls, without `jax.jit`, so that operands are known."""
    token = runner.set(run)
    try:
        with jax.disable_jit():
            yield
    finally:
        runner.reset(token)
