"""The compared cases: shapes, lower bounds of their cost, and the programs that run our kernels."""

from __future__ import annotations

from dataclasses import dataclass

from bench.tpu_static.chips import Chip

HEADS = 8


@dataclass(frozen=True)
class Case:
    """A kernel on one shape.

    Attributes:
      kernel: "attention", "backward" (all that attention's backward pass does), "decode" (attention of one query, of
        `HEADS` heads that share two of keys and values, for a batch of four), "matmul", "softmax" or "rms_norm".
      size: the sequence of attention; the side of a matmul or of the rows' matrix.
      head_dim: of attention.
      causal: of attention.
      projected: whether all contestants of attention take and give [sequence, heads · head_dim], what projections give
        and take; else each takes its favourite layout.
    """

    kernel: str
    size: int
    head_dim: int = 0
    causal: bool = False
    projected: bool = False

    @property
    def name(self) -> str:
        """The name of the case, for tables and `--only`."""
        if not self.head_dim:
            return f"{self.kernel} {self.size}"
        kind = ("causal" if self.causal else "full") + (" projected" if self.projected else "")
        return f"{self.kernel} s{self.size} d{self.head_dim} {kind}"

    @property
    def flops(self) -> int:
        """Floating-point operations of the dots that the result needs; a multiply-add counts as two."""
        if self.kernel == "matmul":
            return 2 * self.size**3
        pairs = self.size * (self.size + 1) // 2 if self.causal else self.size**2
        if self.kernel == "decode":
            return 4 * 2 * 2 * HEADS * self.head_dim * self.size
        dots = {"attention": 2, "backward": 5}.get(self.kernel, 0)
        return 2 * dots * HEADS * self.head_dim * pairs

    @property
    def nbytes(self) -> int:
        """Bytes of the arguments and the result."""
        if self.kernel == "attention":
            return 4 * self.size * HEADS * self.head_dim * 2
        if self.kernel == "decode":
            return 4 * (2 * HEADS + 4 * self.size) * self.head_dim * 2
        if self.kernel == "backward":
            return self.size * HEADS * (8 * self.head_dim * 2 + 4)
        if self.kernel == "matmul":
            return 3 * self.size**2 * 2
        return 2 * self.size**2 * 4 + (self.size * 4 if self.kernel == "rms_norm" else 0)

    def bound(self, machine: Chip) -> float:
        """The lower bound of the time, in microseconds, by the matrix units or the HBM of a device."""
        return max(self.flops / (machine.peak * machine.cores), self.nbytes / (machine.bandwidth * machine.cores)) * 1e6


CASES = (
    *(Case("attention", s, d, causal) for s in (1024, 4096, 16384) for d in (64, 128, 256) for causal in (True, False)),
    Case("attention", 4096, 128, causal=True, projected=True),
    *(Case("backward", 4096, d, causal=True) for d in (64, 128)),
    Case("decode", 8192, 128),
    Case("matmul", 4096),
    Case("softmax", 4096),
    Case("rms_norm", 4096),
)


def ours(case: Case, chip: str) -> str:
    """The program that calls our kernel, for `estimate`: layout [batch, sequence, head, head_dim]."""
    if case.kernel == "backward":
        return _backward(case, chip)
    if case.kernel == "decode":
        setup = "from functools import partial\nfrom tilekern.kernels.flash_attention import flash_attention"
        return decode(case, setup, f"partial(flash_attention, target='tpu:{chip}')")
    if case.projected:
        call = f"flash_attention(q, k, v, causal={case.causal}, target='tpu:{chip}')"
        shape = f"(1, {case.size}, {HEADS}, {case.head_dim})"
        return of_projections(case, "from tilekern.kernels.flash_attention import flash_attention", call, shape)
    target, n = f"tpu:{chip}", case.size
    calls = {
        "attention": f"flash_attention(q, k, v, causal={case.causal}, target={target!r})",
        "matmul": f"matmul(x, w, target={target!r})",
        "softmax": f"softmax(x, target={target!r})",
        "rms_norm": f"rms_norm(x, w, target={target!r})",
    }
    arguments = {
        "attention": ("q, k, v", [((1, n, HEADS, case.head_dim), "bfloat16")] * 3),
        "matmul": ("x, w", [((n, n), "bfloat16")] * 2),
        "softmax": ("x", [((n, n), "float32")]),
        "rms_norm": ("x, w", [((n, n), "float32"), ((n,), "float32")]),
    }
    names, shapes = arguments[case.kernel]
    module = "flash_attention" if case.kernel == "attention" else case.kernel
    return (
        "import jax\n"
        f"from tilekern.kernels.{module} import {module}\n"
        f"fn = lambda {names}: {calls[case.kernel]}\n"
        f"args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in {shapes!r}]\n"
    )


def of_projections(case: Case, setup: str, call: str, shape: str, transposed: bool = False) -> str:
    """The program of attention on arrays [sequence, heads · head_dim].

    Args:
      case: the case.
      setup: source of what `call` needs.
      call: source of attention on q, k and v.
      shape: what it takes, as [sequence, heads, head_dim] before a transposition.
      transposed: whether it takes [heads, sequence, head_dim].
    """
    turn = ".transpose(1, 0, 2)" if transposed else ""
    flat = f"({case.size}, {HEADS * case.head_dim})"
    return f"""
import jax
{setup}
def fn(q, k, v):
    q, k, v = (x.reshape({shape}){turn} for x in (q, k, v))
    return ({call}){turn}.reshape({flat})
args = [jax.ShapeDtypeStruct({flat}, "bfloat16")] * 3
"""


def decode(case: Case, setup: str, attention: str) -> str:
    """The program of `attention(q, k, v)` on keys and values that are kept as [batch, sequence, heads · head_dim]."""
    kept = f"(4, {case.size}, 2, {case.head_dim})"
    return f"""
import jax
{setup}
fn = lambda q, k, v: {attention}(q, k.reshape{kept}, v.reshape{kept})
cache = jax.ShapeDtypeStruct((4, {case.size}, {2 * case.head_dim}), "bfloat16")
args = [jax.ShapeDtypeStruct((4, 1, {HEADS}, {case.head_dim}), "bfloat16"), cache, cache]
"""


def _backward(case: Case, chip: str) -> str:
    """The program of the backward pass: cotangents of query, key and value from those of out."""
    wide, rows = (1, case.size, HEADS, case.head_dim), (1, case.size, HEADS)
    return f"""
import jax
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.derivatives import flash_attention_backward
config = Config(scale={case.head_dim**-0.5}, causal={case.causal})
def fn(q, k, v, out, largest, log_sum, cotangent):
    (found,) = flash_attention_backward(
        q, k, v, Extras(), out, Residuals(largest, log_sum), (cotangent, None),
        config=config, wanted=Tangents(True, True, True), target="tpu:{chip}",
    )
    return found[:3]
wide = jax.ShapeDtypeStruct({wide}, "bfloat16")
args = [wide] * 4 + [jax.ShapeDtypeStruct({rows}, "float32")] * 2 + [wide]
"""
