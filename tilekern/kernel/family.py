"""Families: a kernel or an op for given argument types, as `kernel_call_p` carries it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.errors import GatherWarning, TargetError
from tilekern.kernel.caches import FamilyCaches, gather_warnings
from tilekern.kernel.divided import on_explicit_mesh, partitioned
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.target import DEFAULT, Target, check_runs_here, on_platform
from tilekern.primitive import call

if TYPE_CHECKING:
    from tilekern.kernel.tile_family import TileFamily

# The kernels of a call, each with its target.
type Calls = list[tuple[TileFamily, Target]]

# The jitted program of a call for a target, and how XLA's partitioner treats it.
type Program = tuple[Callable[..., Sequence[jax.Array]], Partitioning]


_SHARD_MAP = "wrap the call in jax.shard_map: then each device calls the kernel for its own part"


class Family:
    """Base of families: an implementation of `tilekern.primitive.Family`.

    Attributes:
      name: the name of the kernel or op.
      asked: the target that the call names; None for the best target of the platform it is lowered for.
      target: the target whose member stands for the family where no platform is known yet.
      outputs: the types of the results.
      caches: the caches of members and programs.
    """

    outputs: Sequence[jax.ShapeDtypeStruct]

    def __init__(self, name: str, asked: Target | None) -> None:
        self.name, self.asked, self.target = name, asked, asked or DEFAULT
        self.caches = FamilyCaches()

    def __repr__(self) -> str:
        return self.name

    def program(self, target: Target) -> Program:
        """The jitted program for a target."""
        raise NotImplementedError

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        """The family of `size` calls at once, operand number n stacked along `dims[n]` (None: shared by all calls).

        All results are stacked along dim 0. Operands must be stacked along the dims returned with the family, which
        differ from `dims` only where a shared operand has to be stacked.
        """
        raise NotImplementedError

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        """The kernels that a call for a target runs, in the order in which their calls begin."""
        raise NotImplementedError

    @property
    def rule(self) -> ShardingRule | None:
        """The sharding rule by the accesses alone, by which a `part` may lack a proof; None if no rule is known."""
        return None

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

    def part(self, parts: Mapping[str, int]) -> Family | str:
        """The kernel or op on parts of the operands; or, as a str, the reason why it is not proved to compute parts.

        Args:
          parts: by name of a factor of the rule, the number of equal parts that devices have of it.
        """
        key = tuple(sorted(parts.items()))
        if key not in self.caches.parts:
            self.caches.parts[key] = self._part(parts) if parts else self
        return self.caches.parts[key]

    def _part(self, parts: Mapping[str, int]) -> Family | str:
        """`part`, for at least one name, without the cache."""
        raise NotImplementedError

    def calls_host(self, target: Target) -> bool:
        """True if a call prints, or checks assertions, which the host may have to do."""
        return False

    def divided(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of a call of which explicit axes of a mesh divide operands."""
        return on_explicit_mesh(self, operands)

    def types_on_mesh(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The types of the results of a call of which explicit axes divide operands; for `divided` that binds it."""
        raise NotImplementedError

    def program_on_mesh(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program of a call of which explicit axes divide operands, traced with their types."""
        raise NotImplementedError

    def call(self, platform: str, site: _meshes.Site) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program for a platform; one object, so that many calls share one computation.

        Raises:
          TargetError: the target is another GPU than this machine's, or XLA would have to partition the program among
            devices, and cannot.
        """
        target = on_platform(platform, self.asked, site.exporting)
        if not site.exporting:
            check_runs_here(target, self.name)
        if site.explicit:
            return self.program_on_mesh(target)
        if site.gathered and self._is_divided_at(site, target):
            return self._partitioned(target)
        program_of_target = self.caches.programs.get(target)
        if program_of_target is None:
            self.caches.programs[target] = program_of_target = self.program(target)
        program, partitioning = program_of_target
        if site.divided and partitioning == "refused":
            raise self._not_partitioned(site)
        if site.divided and partitioning == "replicated":
            self._warn_gathered(site)
        return program

    def _is_divided_at(self, site: _meshes.Site, target: Target) -> bool:
        """True if XLA divides a call on automatic axes."""
        if site.exporting or not site.has_devices or target.platform not in ("cpu", "cuda"):
            return False
        # JAX would free the host's functions that print or assert in a part's program, before it runs.
        rule = self.rule
        return rule is not None and bool(rule.sizes) and not self.calls_host(target)

    def _partitioned(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        key = (target, "partitioned")
        if key not in self.caches.programs:
            self.caches.programs[key] = partitioned(self)
        return self.caches.programs[key]

    def _not_partitioned(self, site: _meshes.Site) -> TargetError:
        return TargetError(
            f"XLA cannot divide the kernel {self.name} among TPUs",
            expected="a program for one device, or a call in jax.shard_map over all axes of the mesh",
            got=f"a program that XLA divides among {site.divided}",
            fix=_SHARD_MAP + self._by_rule(),
        )

    def _by_rule(self) -> str:
        rule = self.sharding
        if rule is None or not rule.sizes:
            return ""
        return (
            f". It may divide dims that have one of the names {', '.join(rule.sizes)} in the rule\n    {rule.notation}"
        )

    def _warn_gathered(self, site: _meshes.Site) -> None:
        shape = (self.name, site.gathered, *((o.shape, o.dtype) for o in self.outputs))
        if not site.gathered or shape in gather_warnings:
            return
        gather_warnings[shape] = None
        message = (
            f"XLA divides a program among {site.divided}, but not its call of {self.name}: each device gathers the "
            f"arguments, {site.gathered} bytes at most, and computes the whole result.\n  fix: {_SHARD_MAP}"
        )
        loc = source.current()
        warnings.warn_explicit(message, GatherWarning, loc.file, loc.line)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The results and their tangents; a tangent that is zero is None, in arguments and results."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        """For each operand that is a `jax.ShapeDtypeStruct`, its cotangent, or None for zeros; else None.

        The results are linear in such operands, taken together. None in `cotangents` stands for zeros.
        """
        raise NotImplementedError

    @cached_property
    def eager(self) -> Callable[..., Sequence[jax.Array]]:
        """The primitive under jit, for calls outside of it."""
        return _jax.jit_checked(partial(call, self), self.name)


def stacked(outputs: Sequence[jax.ShapeDtypeStruct], size: int) -> list[jax.ShapeDtypeStruct]:
    """The types of the results of `size` calls, stacked along dim 0."""
    return [jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in outputs]
