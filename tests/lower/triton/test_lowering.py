"""A Func lowered to Triton, and its use without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import assert_same, softmax
from tilekern import _machine
from tilekern.errors import TargetError
from tilekern.ir.interpret import interpret
from tilekern.lower.lowering import lower
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.passes import pipeline
from tilekern.testing import assert_close


@pytest.fixture
def lowering() -> TritonLowering:
    found = lower(pipeline.run(softmax()), TARGETS["cuda:sm_90"], {"num_warps": 2})
    assert isinstance(found, TritonLowering)
    return found


def test_text(lowering: TritonLowering) -> None:
    assert lowering.text == lowering.program.text and "@triton.jit" in lowering.text
    assert lowering.program.num_warps == 2 and lowering.target is TARGETS["cuda:sm_90"]


def test_interpret(lowering: TritonLowering) -> None:
    pytest.importorskip("triton", reason="needs triton")
    func = softmax()
    x = np.random.default_rng(0).standard_normal(func.inputs[0].ref.shape).astype(func.inputs[0].ref.dtype)
    (found,), (expected,) = lowering.interpret(x), interpret(func, x)
    assert_close(found, expected.astype(np.float64), expected, length=x.shape[-1])
    again = lowering.interpret(x)
    assert_same(again[0], found)


def test_compile(lowering: TritonLowering) -> None:
    pytest.importorskip("triton", reason="needs triton")
    compiled = lowering.compile()
    assert set(compiled.asm) == {"ttir", "ttgir", "ptx", "cubin", "sass"} and all(compiled.asm.values())
    assert compiled.resources.threads == 64


@pytest.mark.skipif(_machine.compute_capability() is not None, reason="needs a machine without a GPU")
def test_a_call_needs_a_gpu(lowering: TritonLowering) -> None:
    pytest.importorskip("triton", reason="needs triton")
    with pytest.raises(TargetError, match="there is no GPU here") as caught:
        lowering.compile()(np.zeros(1))
    assert caught.value.expected and caught.value.got and "interpret" in caught.value.fix
