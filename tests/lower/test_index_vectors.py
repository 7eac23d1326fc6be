"""Index vectors with lanes from outside of an array, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

from tests.programs.index_vectors import Chain, chain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla.emit import run

Outputs = Sequence[np.ndarray]
# XLA compiles in half of the time without LLVM's optimisations, which are not what is under test.
_FAST = {"xla_backend_optimization_level": 0}


def _together(programs: Sequence[Callable[..., Any]], chains: Sequence[Chain]) -> Sequence[Outputs]:
    """The outputs of programs that are compiled as one function."""

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(tuple(program(*x)) for program, x in zip(programs, arrays, strict=True))

    arrays = [c.arrays for c in chains]
    return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


def by_xla(chains: Sequence[Chain]) -> Sequence[Outputs]:
    return _together([partial(run, c.func) for c in chains], chains)


def by_llvm(chains: Sequence[Chain]) -> Sequence[Outputs]:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    return _together([LlvmLowering(c.func, None).run for c in chains], chains)


def by_triton(chains: Sequence[Chain]) -> Sequence[Outputs]:
    pytest.importorskip("triton", reason="needs triton")
    return [triton_interpret(build(c.func, CHIPS["cuda:sm_90"], {}), c.arrays) for c in chains]


def by_mosaic(chains: Sequence[Chain]) -> Sequence[Outputs]:
    lowerings = [MosaicLowering(c.func, TARGETS["tpu:v5e"]) for c in chains]
    return _together([partial(lowering.run, interpret=True) for lowering in lowerings], chains)


# How many chains: as many as take some seconds.
BACKENDS = {by_xla: 12, by_llvm: 30, by_triton: 16, by_mosaic: 5}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
@pytest.mark.parametrize("round", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_what_comes_from_outside_addresses_nothing(
    backend: Callable[[Sequence[Chain]], Sequence[Outputs]], round: int
) -> None:
    seeds = range(round * BACKENDS[backend], (round + 1) * BACKENDS[backend])
    chains = [chain(partial(Random(seed).randint, 0)) for seed in seeds]
    for seed, found, made in zip(seeds, backend(chains), chains, strict=True):
        for got, expected in zip(found, made.expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"seed {seed}:\n{made.func}")
