"""Cases of the library's functions whose schedules are left out: each block is free, or 128."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern.kernels
from bench.texts import function_of
from tilekern.blocks import by_speed, model_of, tiling
from tilekern.blocks.choose import BodyError, Model
from tilekern.errors import LargeProgramWarning, TilekernError
from tilekern.estimate.data_loops import data_loops
from tilekern.ir.control import Switch
from tilekern.ir.core import Func
from tilekern.kernel.composite import called
from tilekern.kernel.instance import Instance
from tilekern.lower.backend import Lowering
from tilekern.lower.lowering import lower
from tilekern.lower.target import Target, backend_of

type Sizes = tuple[int, ...]
"""The sizes of a kernel's blocks, in the order of its parameters."""


@dataclass(frozen=True)
class Case:
    """A case of a function of the library that runs one kernel with blocks, on a target.

    Attributes:
      title: the function and the case, "rms_norm square".
      kernel: the kernel with the blocks of its schedule.
      target: the target.
    """

    title: str
    kernel: Instance
    target: Target

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks."""
        assert self.kernel.tuning is not None
        return tuple(self.kernel.tuning.signature.blocks)

    @property
    def of_schedule(self) -> Sizes:
        """The blocks of the schedule."""
        return tuple(int(self._settings[name]) for name in self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(p.ref.shape) * p.ref.dtype.itemsize for p in self.kernel.func(self.target).params)

    @property
    def depends_on_data(self) -> bool:
        """True if the work depends on values of arrays."""
        func = self.kernel.func(self.target)
        return bool(data_loops(func)) or any(type(op) is Switch for op in func.walk())

    @property
    def model(self) -> Model:
        """The model of the target."""
        model = model_of(self.target)
        assert model is not None
        return model

    @cached_property
    def of_model(self) -> Sizes:
        """The fastest blocks by the model that the target takes. All blocks start with 128, and may change."""
        for blocks in self.by_speed():
            if not self.is_refused(blocks):
                return blocks
        raise AssertionError("the schedule's blocks are not refused, and the model has more choices than these")

    @cached_property
    def arrays(self) -> Sequence[jax.Array]:
        """Random operands: standard normal, integers 0 or 1."""
        random = np.random.default_rng(0)
        return [
            jnp.asarray(random.integers(0, 2, t.shape), t.dtype)
            if jnp.issubdtype(t.dtype, jnp.integer) or t.dtype == bool
            else jnp.asarray(random.standard_normal(t.shape, np.float32)).astype(t.dtype)
            for t in self.kernel.types
        ]

    def by_speed(self) -> Iterator[Sizes]:
        """All choices of blocks, the fastest by the model first."""
        start = dict.fromkeys(self.names, 128)
        takes_extents = backend_of(self.target).takes_extents
        for sizes in by_speed(self._funcs, start, self.names, self.model, takes_extents=takes_extents):
            yield tuple(sizes.get(name, 128) for name in self.names)

    def modelled(self, blocks: Sizes) -> float:
        """Seconds by the model."""
        return float(self.model(tiling(self.func(blocks))))

    def func(self, blocks: Sizes) -> Func:
        """The block IR with these blocks."""
        return self.varied(blocks).func(self.target)

    def lowered(self, blocks: Sizes) -> Lowering:
        """The target's program with these blocks. Its launch options are the target's defaults, not the schedule's.

        Raises:
          TilekernError: the target refuses the blocks.
        """
        return lower(self.func(blocks), self.target, {})

    def is_refused(self, blocks: Sizes) -> bool:
        """True if the target refuses the blocks, or warns of a large program where warnings are errors."""
        try:
            self.lowered(blocks)
        except (TilekernError, LargeProgramWarning):
            return True
        return False

    def varied(self, blocks: Sizes) -> Instance:
        """The kernel with these blocks, and with the choices and the launch options of the schedule."""
        assert self.kernel.tuning is not None
        settings = {**self._settings, **dict(zip(self.names, blocks, strict=True))}
        return self.kernel.tuning.varied(settings, self.target)

    @property
    def _settings(self) -> Mapping[str, Any]:
        assert self.kernel.tuning is not None
        return self.kernel.tuning.settings(self.target)

    def _funcs(self, blocks: Mapping[str, Any]) -> list[Func]:
        try:
            return [self.func(tuple(blocks[name] for name in self.names))]
        except TilekernError as error:
            raise BodyError from error


def cases(target: Target, dtype: Any) -> Iterator[Case]:
    """The cases of a target: the first of each function, then the second of each, and so on."""
    folders = sorted(path.parent.name for path in Path(tilekern.kernels.__path__[0]).glob("*/cases.py"))
    of_function = {name: importlib.import_module(f"tilekern.kernels.{name}.cases").CASES for name in folders}
    for number in range(max(map(len, of_function.values()))):
        for name, of_name in of_function.items():
            if number < len(of_name) and (case := case_of(name, of_name[number], target, dtype)):
                yield case


def case_of(name: str, case: Any, target: Target, dtype: Any) -> Case | None:
    """A case of a function; None if the function runs another number of kernels than one, or one without blocks."""
    types = jax.eval_shape(partial(case.arrays, dtype=dtype), jax.random.key(0))
    kernels = [kernel for kernel, _ in called(jax.make_jaxpr(function_of(name, case))(*types), target)]
    if len(kernels) != 1 or kernels[0].tuning is None or not kernels[0].tuning.signature.blocks:
        return None
    return Case(f"{name} {case.name}", kernels[0], target)
