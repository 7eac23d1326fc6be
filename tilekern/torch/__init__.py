"""Kernels as functions of PyTorch's tensors; PyTorch is imported by the first `wrap`."""

from tilekern.torch.wrapping import wrap

__all__ = ["wrap"]
