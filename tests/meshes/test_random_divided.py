"""Random kernels on random meshes: values and gradients are those of one device, or the call is refused."""

from __future__ import annotations

from random import Random

import pytest

from tests import seeds
from tilekern.testing.fuzz import meshes
from tilekern.testing.programs.batches import Choices

_CHUNK = 20


@pytest.mark.sweep(125)
@pytest.mark.parametrize("chunk", range(250))
def test_random_kernels_on_meshes(chunk: int) -> None:
    """5,000 calls in all."""
    for seed in seeds.of_chunk(chunk, _CHUNK):
        call = meshes.draw(Choices(random=Random(seed)))
        try:
            call.check()
        except meshes.REFUSALS:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{call.script()}") from error
