"""The makers of GPUs, and the names that Triton and JAX have for their compilers and platforms."""

from __future__ import annotations

from tilekern.ir.records import record


@record
class Vendor:
    """A maker of GPUs.

    Attributes:
      name: the maker.
      platform: JAX's name of the platform, and the first part of the names of targets.
      backend: Triton's name of its backend.
      folder: the package of `triton.backends` that has it.
      assembly: Triton's name of the assembly, the last stage that is text.
      code: Triton's name of the machine code.
      lanes: threads of a warp.
      jax: the command that installs JAX for its GPUs.
    """

    name: str
    platform: str
    backend: str
    folder: str
    assembly: str
    code: str
    lanes: int
    jax: str

    @property
    def stages(self) -> tuple[str, str, str]:
        """Stages of compilation as text; the machine code comes after them."""
        return "ttir", "ttgir", self.assembly


NVIDIA = Vendor("NVIDIA", "cuda", "cuda", "nvidia", "ptx", "cubin", 32, "pip install 'jax[cuda13]'")
AMD = Vendor("AMD", "rocm", "hip", "amd", "amdgcn", "hsaco", 64, "pip install 'jax[rocm7-local]'")

VENDORS = {vendor.backend: vendor for vendor in (NVIDIA, AMD)}
"""Makers by Triton's name of their backend."""
