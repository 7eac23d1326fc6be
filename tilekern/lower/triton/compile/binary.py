"""Machine code of a program, with the compiler's data for its launch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from tilekern.ir.records import record
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.vendor import NVIDIA, VENDORS, Vendor


@record
class DescriptorFormat:
    """The TMA descriptor that the code expects for one argument.

    Attributes:
      elem_type: number of the element type in Triton's encoding.
      swizzle: swizzle of shared memory: 0 is none; 1, 2, 3 are 32, 64, 128 bytes.
      block: shape of the box that one copy moves, outermost dim first; no row is longer than the swizzle.
    """

    elem_type: int
    swizzle: int
    block: tuple[int, ...]


@record
class Binary:
    """A compiled program. All numbers come from the compiler, and may differ from the request.

    Attributes:
      name: symbol of the entry function.
      asm: the vendor's stages as text, its machine code as bytes.
      capability: the chip's `capability`.
      num_warps: warps in a program.
      num_ctas: thread blocks in a cluster.
      shared_bytes: dynamic shared memory of a program.
      tensor_columns: columns of tensor memory of a program (from capability 100 on).
      global_scratch_bytes: global memory of each program for itself.
      global_scratch_align: alignment of that memory, in bytes.
      descriptors: formats of the arguments that are descriptors, in their order.
      backend: Triton's name of its backend, by which its vendor is known.
    """

    name: str
    asm: Mapping[str, str | bytes]
    capability: int
    num_warps: int
    num_ctas: int
    shared_bytes: int
    tensor_columns: int
    global_scratch_bytes: int
    global_scratch_align: int
    descriptors: tuple[DescriptorFormat, ...]
    backend: str = NVIDIA.backend

    @property
    def vendor(self) -> Vendor:
        """The maker of the GPUs that run it."""
        return VENDORS[self.backend]

    @cached_property
    def sass(self) -> str:
        """The machine's instructions as text, from NVIDIA's disassembler."""
        return toolchain.disassemble(self.code)

    @cached_property
    def report(self) -> str:
        """The report of NVIDIA's assembler about registers and spills; takes another run of it."""
        return toolchain.assemble(self.text("ptx"), self.capability)[1]

    @property
    def code(self) -> bytes:
        """The machine code, an ELF file; b"" if the driver has to compile the assembly."""
        code = self.asm[self.vendor.code]
        assert isinstance(code, bytes)
        return code

    def text(self, stage: str) -> str:
        """The text of one of the vendor's stages."""
        text = self.asm[stage]
        assert isinstance(text, str)
        return text

    def to_files(self) -> dict[str, bytes]:
        """The binary as the contents of files; `from_files` reads them."""
        fields = {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}
        del fields["asm"]
        fields["descriptors"] = [asdict(descriptor) for descriptor in self.descriptors]
        texts = {stage: self.text(stage).encode() for stage in self.vendor.stages}
        return {"launch.json": json.dumps(fields, indent=1).encode(), **texts, self.vendor.code: self.code}

    @staticmethod
    def from_files(files: Mapping[str, bytes]) -> Binary:
        """Read a binary from the files of `to_files`.

        Raises:
          ValueError: the files hold no binary, or one with other fields.
        """
        launch: Any = json.loads(files["launch.json"])
        try:
            vendor = VENDORS[launch["backend"]]
            asm: dict[str, str | bytes] = {stage: files[stage].decode() for stage in vendor.stages}
            formats = launch.pop("descriptors")
            descriptors = [DescriptorFormat(f["elem_type"], f["swizzle"], tuple(f["block"])) for f in formats]
            binary = Binary(asm={**asm, vendor.code: files[vendor.code]}, descriptors=tuple(descriptors), **launch)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"launch.json has other fields: {error!r}") from error
        if not all(type(vars(binary)[name]) is (str if name in ("name", "backend") else int) for name in launch):
            raise ValueError(f"launch.json has fields of other types: {launch}")
        return binary
