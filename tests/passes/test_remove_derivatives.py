import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tests.passes.golden import assert_becomes
from tilekern.passes.remove_derivatives import remove_derivatives


def test_the_operand_takes_the_place_of_the_result() -> None:
    assert_becomes(
        remove_derivatives,
        """
        %1 = load %x[%i] : f32[]
        %2 = stop_gradient(%1) : f32[]
        %3 = custom_derivative(%2, %1) {reason="none"} : f32[]
        %4 = mul(%3, %1) : f32[]
        %5 = add(%4, %4) : f32[]
        store %5 to %fs[%i]""",
        """
        %1 = load %x[%i!] : f32[]
        %4 = mul(%1, %1) : f32[]
        %5 = add(%4, %4) : f32[]
        store %5 to %fs[%i!]""",
    )


@tk.kernel(out_type=lambda x, n: x)
def centred(x, n, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = x[i] - jax.lax.stop_gradient(x[i].max()) + jax.lax.stop_gradient(n[i])


def test_stops_of_floats_survive_the_passes_of_every_func_and_no_target_sees_them() -> None:
    x, n = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32)
    traced = centred.trace(x, n)
    assert str(traced).count("stop_gradient(") == 1
    wanted = x - np.repeat(x[3::4], 4) + n
    for target in ("cpu:xla", "cpu:llvm"):
        np.testing.assert_array_equal(centred(x, n, target=target), wanted)
    np.testing.assert_array_equal(jnp.asarray(traced.interpret(x, n)), wanted)
