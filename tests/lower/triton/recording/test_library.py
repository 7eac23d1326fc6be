"""Programs of the library, launched by jaxlib on a driver that records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import pytest

from bench.texts import function_of, gradient, kernels_of
from tests.lower.library import CASES, DIFFERENTIABLE
from tests.lower.triton.gluon.samples import like, needs_clusters
from tests.lower.triton.recording.checks import check
from tests.lower.triton.recording.driver import addresses, driver
from tilekern.kernels.matmul.kernel import matmul
from tilekern.lower.target import resolve
from tilekern.lower.triton.call import described
from tilekern.lower.triton.lowering import TritonLowering

TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100")
DTYPES = ("bfloat16", "float32")
# Triton compiles the gradients of these for half a minute.
LONG = ("gated_delta_rule", "linear_attention")
SAMPLED = [
    pytest.param(
        *(name, case.name, mode), marks=pytest.mark.slow if name in LONG and mode == "gradient" else pytest.mark.smoke
    )
    for name, cases in CASES.items()
    for case in cases
    for mode in (("forward", "gradient") if name in DIFFERENTIABLE else ("forward",))
]


def lowerings(name: str, case: str, dtype: str, mode: str, target: str) -> Iterator[TritonLowering]:
    """The programs of a library function or of its gradient."""
    (found,) = (c for c in CASES[name] if c.name == case)
    arrays = jax.eval_shape(partial(found.arrays, dtype=dtype), jax.random.key(0))
    call = function_of(name, found)
    for kernel in kernels_of(partial(gradient, call) if mode == "gradient" else call, arrays, resolve(target)):
        lowering = kernel.lowered(resolve(target))
        assert isinstance(lowering, TritonLowering)
        yield lowering


@pytest.mark.sweep(360)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "case", "mode"), SAMPLED)
def test_a_program_is_launched_as_its_code_expects(name: str, case: str, mode: str, dtype: str, target: str) -> None:
    recording = driver(int(target[8:]))
    for lowering in lowerings(name, case, dtype, mode, target):
        asked = described(lowering.program, lowering._binary)
        check(lowering, recording.launch(asked, addresses(lowering.program)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("clusters", [False, pytest.param(True, marks=needs_clusters)])
def test_warp_specialised_programs_are_launched_as_their_code_expects(clusters: bool) -> None:
    blocks = {"block_m": 128, "num_ctas": 2} if clusters else {"block_m": 64, "num_ctas": 1}
    traced = matmul.trace(like(300, 200), like(200, 136), transpose_lhs=False, block_n=64, block_k=64, **blocks)
    lowering = traced.lower("cuda:sm_90", emitter="gluon")._lowered
    assert isinstance(lowering, TritonLowering) and lowering.program.cluster == 1 + clusters
    asked = described(lowering.program, lowering._binary)
    check(lowering, driver(90).launch(asked, addresses(lowering.program)))
