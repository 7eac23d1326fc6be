"""Faults in calls, their derivatives, and the prebuilt kernels."""

from tests.mutants.mutant import Mutant

_ATTENTION = (
    "tests/kernels/flash_attention/test_kernel.py",
    "tests/kernels/flash_attention/test_large_logits.py",
    "tests/kernels/flash_attention/test_derivatives.py",
)

MUTANTS = (
    Mutant(
        "meshes: cotangents do not vary over the axes of their operands",
        "tilekern/_meshes.py",
        "return _varying(value, missing) if missing else value",
        "return value",
        ("tests/meshes",),
    ),
    Mutant(
        "ragged_dot: the first row of a group is the last of the one before",
        "kernels/ragged_dot/kernel.py",
        "mine = (i.indices >= begin) & (i.indices < end)",
        "mine = (i.indices > begin) & (i.indices < end)",
        ("tests/kernels/ragged_dot",),
    ),
    Mutant(
        "cross_entropy: an infinite logit gives NaN",
        "kernels/cross_entropy/kernel.py",
        "base = jnp.where(jnp.abs(grown) == jnp.inf, 0, grown)",
        "base = grown",
        ("tests/kernels/cross_entropy",),
    ),
    Mutant(
        "cross_entropy: words of two parts of the vocabulary count twice",
        "kernels/cross_entropy/backward.py",
        "jnp.where(j.indices[None, :] >= done[()], gradient, 0)",
        "gradient",
        ("tests/kernels/cross_entropy/test_derivatives.py",),
    ),
    Mutant(
        "vmap: an operand that runs share gets one cotangent",
        "tilekern/kernel/vmapped_rules.py",
        "return cotangent.sum(axis=0) if dim is None",
        "return cotangent[0] if dim is None",
        ("tests/kernel/test_derivatives.py", "tests/test_vmap.py"),
    ),
    Mutant(
        "jvp: the tangent of a linear operand is left out",
        "tilekern/kernel/stated_rules.py",
        "total = [m if t is None else t if m is None else t + m",
        "total = [m if t is None else t",
        ("tests/kernel/test_derivatives.py",),
    ),
    Mutant(
        "packed: the last of an odd number of 4-bit numbers is cut off",
        "tilekern/kernel/packed.py",
        "[..., : aval.shape[-1]]",
        "[..., : aval.shape[-1] // 2 * 2]",
        ("tests/lang/test_four_bits.py",),
    ),
    Mutant(
        "attention: the softmax is scaled before the maximum is subtracted",
        "kernels/flash_attention/scores.py",
        "jnp.exp2((logits - self.rows(rows.largest)) * self.factor - self.rows(rows.log_sum))",
        "jnp.exp2(logits * self.factor - self.rows(rows.largest * self.factor) - self.rows(rows.log_sum))",
        ("tests/kernels/flash_attention/test_large_logits.py", *_ATTENTION),
    ),
    Mutant(
        "attention: the diagonal is masked",
        "kernels/flash_attention/masks.py",
        "else rows >= columns",
        "else rows > columns",
        _ATTENTION,
    ),
    Mutant(
        "attention: the softcap has no derivative",
        "kernels/flash_attention/scores.py",
        "            (ds,) = pull(ds)\n",
        "",
        ("tests/kernels/flash_attention/test_features.py", *_ATTENTION),
    ),
    Mutant(
        "recurrences: a number that comes again in a chunk begins no packed sequence",
        "kernels/recurrences.py",
        "    other_axes = [d for d in range(log_decays.ndim) if d != axis]\n",
        "    earlier = t.indices[:, None] > t.indices[None, :]\n"
        "    again = earlier & (segment_ids[b, t][:, None] == segment_ids[b, t][None, :])\n"
        "    first = first & (jnp.where(again, 1, 0).sum(axis=1) == 0)\n"
        "    other_axes = [d for d in range(log_decays.ndim) if d != axis]\n",
        ("tests/kernels/test_recurrences.py", "tests/kernels/linear_attention/test_kernel.py"),
        modes="library of packed sequences",
    ),
    Mutant(
        "recurrences: tokens beyond the end begin a packed sequence",
        "kernels/recurrences.py",
        "return t.valid & (segment_ids[b, t] != ",
        "return (segment_ids[b, t] != ",
        ("tests/kernels/test_recurrences.py", "tests/kernels/linear_attention/test_kernel.py"),
    ),
    Mutant(
        "norms: the gradient of a long row leaves out a share",
        "kernels/norms.py",
        "products = products + (g * s).sum(axis=1) + shift * shift_g * between",
        "products = products + (g * s).sum(axis=1)",
        ("tests/kernels/test_derivatives.py", "tests/kernels/rms_norm", "tests/kernels/layer_norm"),
    ),
)
