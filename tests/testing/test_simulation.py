"""Arrays of a call on a mesh, as `tilekern.testing` divides them."""

from __future__ import annotations

import numpy as np

from tilekern.kernels.rope import reference, rope
from tilekern.testing import compare
from tilekern.testing.simulation import divided


def test_a_function_may_compute_operands_of_its_kernel() -> None:
    """`rope` computes angles from positions, which its kernel takes."""
    x = np.random.default_rng(0).standard_normal((8, 8, 8, 8)).astype(np.float32)
    (on_devices,) = divided(rope, [x])
    assert len(on_devices.sharding.device_set) == 8
    assert not on_devices.is_fully_replicated
    np.testing.assert_array_equal(on_devices, x)
    report = compare(rope, x, targets=["mesh"], reference=reference)  # raises where results differ
    assert "mesh" in report.targets
