"""Fused operations of PyTorch that do what kernels of training do, each in the layout that PyTorch is best at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from bench.gpu.clock import Contestant
from bench.gpu.peers import Arrays, Peer, by_torch, tensor

Laid = Callable[..., Sequence[Any]]
NAME = "torch"


def peer(sets: Any, make: Callable[[Any], Contestant]) -> Iterator[Peer]:
    """The one peer that `make` makes of input sets."""
    yield Peer(NAME, partial(make, sets))


def _of(sets: Sequence[Arrays], laid: Laid, function: Callable[..., Any], back: Any = lambda x: x) -> Contestant:
    """A function of tensors that `laid` puts into the layout of PyTorch."""
    return by_torch(NAME, function, [laid(*map(tensor, arrays)) for arrays in sets], back)


def group_norm(sets: Sequence[Arrays], *, num_groups: int, eps: float, activation: str | None) -> Contestant:
    """Group norm of x[N, S, S, C], in PyTorch's own layout [N, C, S, S]."""
    from torch.nn import functional

    def call(x: Any, weight: Any, bias: Any) -> Any:
        out = functional.group_norm(x, num_groups, weight, bias, eps)
        return functional.silu(out, inplace=True) if activation == "silu" else out

    def laid(x: Any, weight: Any, bias: Any) -> Any:
        return x.permute(0, 3, 1, 2).contiguous(), weight, bias

    return _of(sets, laid, call, lambda out: out.permute(0, 2, 3, 1))


def causal_conv1d(sets: Sequence[Arrays], *, activation: str | None) -> Contestant:
    """A depthwise convolution of x[B, T, C] by weight[K, C], in PyTorch's own layout [B, C, T]."""
    from torch.nn import functional

    def call(x: Any, weight: Any, bias: Any) -> Any:
        channels, _, taps = weight.shape
        out = functional.conv1d(x, weight, bias, padding=taps - 1, groups=channels)[..., : x.shape[2]]
        return functional.silu(out) if activation == "silu" else out

    def laid(x: Any, weight: Any, bias: Any) -> Any:
        return x.transpose(1, 2).contiguous(), weight.T.contiguous()[:, None], bias

    return _of(sets, laid, call, lambda out: out.transpose(1, 2))


def product(sets: Sequence[Arrays], function: Callable[..., Any]) -> Contestant:
    """A function of tensors in the layout of the arrays."""
    return _of(sets, lambda *tensors: tensors, function)


def gelu_product(x: Any, w: Any, bias: Any) -> Any:
    """gelu(x w + bias) in one call of cuBLASLt."""
    import torch

    return torch._addmm_activation(bias, x, w, use_gelu=True)


def added_product(x: Any, w: Any, residual: Any) -> Any:
    """residual + x w in one call of cuBLAS."""
    import torch

    return torch.addmm(residual, x, w)


def grouped(sets: Sequence[Arrays], function: Callable[..., Any]) -> Contestant:
    """A function of tensors, to which the sizes of groups are given as their ends."""
    import torch

    def laid(*tensors: Any) -> Any:
        return [x.cumsum(0, dtype=torch.int32) if x.dtype == torch.int32 else x for x in tensors]

    return _of(sets, laid, function)


def grouped_dot(lhs: Any, rhs: Any, ends: Any) -> Any:
    """`ragged_dot`."""
    import torch

    return torch._grouped_mm(lhs, rhs, ends)


def grouped_step(lhs: Any, rhs: Any, ends: Any, cotangent: Any) -> Any:
    """`ragged_dot` and its gradients by rows and matrices."""
    import torch

    by_rows = torch._grouped_mm(cotangent, rhs.transpose(1, 2), ends)
    return grouped_dot(lhs, rhs, ends), by_rows, torch._grouped_mm(lhs.T, cotangent, ends)


def gated_dot(lhs: Any, gate: Any, up: Any, ends: Any) -> Any:
    """`fused_ragged_dot` with the epilogue silu(gate) up: two products, and a pass over both."""
    from torch.nn import functional

    return functional.silu(grouped_dot(lhs, gate, ends)) * grouped_dot(lhs, up, ends)


def scaled_grouped_dot(sets: Sequence[Arrays]) -> Contestant:
    """A grouped product of float8_e4m3fn, by scales of rows and of columns: lhs, rhs, sizes, lhs_scale, rhs_scale."""
    import torch

    def laid(lhs: Any, rhs: Any, sizes: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
        by_columns = rhs.transpose(1, 2).contiguous().transpose(1, 2)  # the only layout of float8 on Hopper
        return lhs, by_columns, lhs_scale.reshape(-1), rhs_scale.squeeze(1), sizes.cumsum(0, dtype=torch.int32)

    def call(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, ends: Any) -> Any:
        return torch._scaled_grouped_mm(lhs, rhs, lhs_scale, rhs_scale, offs=ends, out_dtype=torch.bfloat16)

    return _of(sets, laid, call)


def adamw(sets: Sequence[tuple[Any, ...]], *, rate: float, decay: float) -> Contestant:
    """The fused AdamW of float32 weights: sets of the weight, its state and the gradient."""
    import torch

    steps: list[Any] = []
    for weight, _, gradient in sets:
        held = torch.nn.Parameter(tensor(jnp.copy(weight)))
        held.grad = tensor(gradient)
        steps.append((held, torch.optim.AdamW([held], lr=rate, weight_decay=decay, fused=True)))

    def call(held: Any, optimizer: Any) -> Any:
        optimizer.step()
        return held.data

    return by_torch(NAME, call, steps)
