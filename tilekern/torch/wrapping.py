"""`wrap`: a JAX function as a function of PyTorch's tensors, and the operators of PyTorch that its calls become.

Tensors become arrays by DLPack and stay where they are. There are three operators for all functions: `tilekern::call`,
`tilekern::call_saving`, which also returns what the backward pass needs, and `tilekern::backward`. They know a call by
its number, its place in a table of this process, since operators take tensors and numbers only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from tilekern import source
from tilekern.errors import ArgumentError
from tilekern.torch.calls import Call, CallKey, Name, name_of

_CALLS: list[Call] = []
_NUMBERS: dict[CallKey, int] = {}


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, or another JAX function of arrays, as a function of PyTorch's tensors.

    Tensors are positional or keyword arguments, on the CPU or on a GPU that JAX has, too. They and the results share
    memory with JAX's arrays by DLPack; a tensor that is not contiguous is copied. All other arguments are static. The
    results are tensors: one, or a tuple, in which None stays.

    `backward()` and `torch.autograd.grad` run the derivatives of JAX, of any order: with `create_graph=True` the
    backward pass computes the forward pass again. `torch.compile` takes calls whose static arguments are constants of
    Python, and compiles anew for other shapes; it takes derivatives of the first order.

    Args:
      function: a kernel, an op, or any JAX function of arrays that returns an array or a tuple of arrays and None.

    Raises:
      ImportError: PyTorch is not installed.
      tilekern.errors.ArgumentError: by a call: an argument is a container of tensors, is no tensor and has no hash, or
        has a dtype that JAX would narrow; or the function returns something else.

    Example:
      >>> import torch  # doctest: +SKIP
      >>> from tilekern.kernels.softmax import softmax
      >>> wrap(softmax)(torch.zeros(2, 2))  # doctest: +SKIP
      tensor([[0.5000, 0.5000],
              [0.5000, 0.5000]])
    """
    torch, own = torch_module(), operators()

    @wraps(function)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        tensors: list[Any] = []
        arrays: list[Name] = []
        static: list[tuple[Name, Any]] = []
        for name, value in (*enumerate(args), *keywords.items()):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                arrays.append(name)
            else:
                static.append((name, value))
        needs = tuple([t.requires_grad and torch.is_grad_enabled() for t in tensors])
        number = own.number(function, tuple(arrays), tuple(static), needs)
        results = own.call_saving(tensors, number) if any(needs) else own.call(tensors, number)
        single, present = own.structure(number)
        if single:
            return results[0]
        rest = iter(results)
        return tuple([next(rest) if there else None for there in present])

    return wrapped


def torch_module() -> Any:
    """The module `torch`, imported by the call; typed Any, so that pyright needs no PyTorch."""
    return import_module("torch")


def _number(function: Callable[..., Any], arrays: Any, static: Any, needs: Any) -> int:
    """The place of a call in `_CALLS`: 0 for the first call. An unknown call is appended."""
    for name, value in static:
        if any(type(leaf).__module__.partition(".")[0] == "torch" for leaf in jax.tree.leaves(value)):
            raise ArgumentError(
                f"an argument of {name_of(function)} is a container of tensors",
                expected="tensors as arguments of their own",
                got=f"{name}={type(value).__name__}",
                fix="wrap a function that takes the tensors one by one",
            )
    key = CallKey(function, arrays, static, needs)
    try:
        number = _NUMBERS.get(key)
    except TypeError:
        raise ArgumentError(
            f"an argument of {name_of(function)} is neither a tensor nor static",
            expected="tensors, and values that have a hash, such as numbers, strings and tuples",
            got=", ".join(f"{name}={type(value).__name__}" for name, value in static),
            fix="pass arrays as torch.Tensor",
        ) from None
    if number is None:
        number = _NUMBERS[key] = len(_CALLS)
        _CALLS.append(Call(key))
    return number


def _structure(number: int) -> tuple[bool, tuple[bool, ...]]:
    return _CALLS[number].single, _CALLS[number].present


@dataclass(frozen=True)
class Operators:
    """The operators of PyTorch, and functions whose results its compiler takes for constants.

    Attributes:
      call: from tensors and the number of a call to the results.
      call_saving: the same with a gradient, and what the backward pass needs behind the results.
      number: from function, names of tensors, static arguments and the flags of tensors that need a gradient to the
        number of the call.
      structure: of a call that was made, `Call.single` and `Call.present`.
    """

    call: Callable[..., Any]
    call_saving: Callable[..., Any]
    number: Callable[..., int]
    structure: Callable[..., tuple[bool, tuple[bool, ...]]]


@cache
def operators() -> Operators:
    """The operators, which the first call registers with PyTorch."""
    torch = torch_module()
    source.register_internal(os.path.dirname(torch.__file__))
    custom, constant = torch.library.custom_op, torch.compiler.assume_constant_result
    schema = "(Tensor[] tensors, int number) -> Tensor[]"
    call = custom("tilekern::call", _run, mutates_args=(), schema=schema)
    call_saving = custom("tilekern::call_saving", _run, mutates_args=(), schema=schema)
    backward = custom(
        "tilekern::backward",
        _run_backward,
        mutates_args=(),
        schema="(Tensor[] tensors, Tensor[] returned, Tensor[] cotangents, int number) -> Tensor[]",
    )
    call.register_fake(_fake)
    call_saving.register_fake(_fake)
    backward.register_fake(_fake_backward)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.number = inputs
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *output)

    def gradients(ctx: Any, cotangents: Any) -> Any:
        tensors, returned = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        made: Call = _CALLS[int(ctx.number)]
        results = returned[: sum(made.present)]
        filled = [
            torch.zeros_like(result) if cotangent is None else cotangent
            for result, cotangent in zip(results, cotangents[: len(results)], strict=True)
        ]
        if torch.is_grad_enabled():  # by create_graph=True
            floats = [c for result, c in zip(results, filled, strict=True) if _is_inexact(result)]
            moving = iter(wrap(made.gradient)(*tensors, *floats))
        else:
            moving = iter(backward(list(tensors), list(returned), filled, ctx.number))
        return [next(moving) if needs else None for needs in made.key.needs], None

    call_saving.register_autograd(gradients, setup_context=save)
    return Operators(call, call_saving, constant(_number), constant(_structure))


def _run(tensors: Sequence[Any], number: int) -> list[Any]:
    arrays = [array_of(tensor) for tensor in tensors]
    results = _CALLS[number].plan([_type(tensor) for tensor in tensors]).run(*arrays)
    return tensors_of(results, tensors)


def _run_backward(tensors: Sequence[Any], returned: Sequence[Any], cotangents: Sequence[Any], number: int) -> list[Any]:
    plan = _CALLS[number].plan([_type(tensor) for tensor in tensors])
    arrays, saved, given = ([array_of(t) for t in group] for group in (tensors, returned, cotangents))
    return tensors_of(plan.backward(arrays, saved, given), (*tensors, *returned, *cotangents))


def _fake(tensors: Sequence[Any], number: int) -> list[Any]:
    plan = _CALLS[number].plan([_type(tensor) for tensor in tensors])
    torch = torch_module()
    device = tensors[0].device if tensors else None
    types = (*plan.results, *plan.residuals)
    return [torch.empty(t.shape, dtype=getattr(torch, t.dtype.name), device=device) for t in types]


def _fake_backward(tensors: Sequence[Any], returned: Any, cotangents: Any, number: int) -> list[Any]:
    torch = torch_module()
    needs = _CALLS[number].key.needs
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, n in zip(tensors, needs, strict=True) if n]


def _is_inexact(tensor: Any) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _type(tensor: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ArgumentError(
            "JAX would narrow a tensor of 64 bits",
            expected="dtypes of at most 32 bits, unless JAX has 64 bits enabled",
            got=f"dtype={tensor.dtype}",
            fix="cast the tensor, or jax.config.update('jax_enable_x64', True)",
        )
    return jax.ShapeDtypeStruct(tuple(map(int, tensor.shape)), dtype)


def array_of(tensor: Any) -> jax.Array:
    """The tensor as an array in the same memory, if it is contiguous; else a copy."""
    dlpack: Any = jax.dlpack  # of whose functions JAX declares parts
    return dlpack.from_dlpack(tensor.detach().contiguous())


def tensors_of(arrays: Sequence[jax.Array], inputs: Sequence[Any]) -> list[Any]:
    """The arrays as tensors that share no memory with the inputs or with each other.

    JAX returns an input as it is where a function does, and PyTorch's operators must not. On the CPU JAX computes while
    Python goes on, and PyTorch does not know of that.
    """
    torch = torch_module()
    jax.block_until_ready(arrays)
    taken = {tensor.data_ptr() for tensor in inputs}
    tensors: list[Any] = []
    for array in arrays:
        tensor = torch.from_dlpack(array)
        tensors.append(tensor.clone() if tensor.data_ptr() in taken else tensor)
        taken.add(tensor.data_ptr())
    return tensors
