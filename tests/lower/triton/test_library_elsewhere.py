"""The library's defaults on the GPUs that have no ceilings of their own: they fit, and hardly spill."""

from __future__ import annotations

import pytest

from tests.lower.triton import ceilings, test_library
from tests.lower.triton.test_library import compiled, shown
from tilekern.lower.target import TARGETS

OTHERS = tuple(name for name in TARGETS if TARGETS[name].backend == "triton" and name not in ceilings.TARGETS)
ALL = [(*key[:3], target) for key in test_library.ALL if key[3] == ceilings.TARGETS[0] for target in OTHERS]

# Bytes of registers that spill: kernels of attention's gradient, whose tiles are those of sm_80; and scores of a
# vocabulary on sm_103, whose tiles are those of sm_100, where 16 warps spill nothing and take 1.3 times as long by its
# estimate, and tiles of 64 words 1.5 times.
SPILLS = {
    ("llama3_8b:backward_key", "cuda:sm_86"): 48,
    ("llama3_8b:backward_key", "cuda:sm_89"): 48,
    ("llama3_8b:backward_query", "cuda:sm_120"): 12,
    ("gemma_2b:backward_query", "cuda:sm_86"): 4,
    ("gemma_2b:backward_query", "cuda:sm_89"): 4,
    ("llama3_8b_any:best_of_parts", "cuda:sm_103"): 360,
}


@pytest.fixture(scope="module", autouse=True)
def needs_triton() -> None:
    pytest.importorskip("triton", reason="needs triton")


@pytest.mark.sweep(120)
@pytest.mark.parametrize(("name", "case", "dtype", "target"), [pytest.param(*key, id=shown(key)) for key in ALL])
def test_the_default_configuration_fits(name: str, case: str, dtype: str, target: str) -> None:
    """Compiling refuses a program with too much shared memory."""
    assert compiled(name, case, dtype, target).resources.spills <= SPILLS.get((case, target), 0)
