"""An interpreter of PTX, the assembly of NVIDIA's GPUs: what compiled programs compute, without a GPU.

| file | holds |
|---|---|
| `parse.py` | text → instructions |
| `machine.py` | threads, registers and memory of a launch, and the loop that runs instructions |
| `arithmetic.py` | instructions that compute in the registers of a thread |
| `warps.py` | instructions among the threads of a warp |
| `memory.py` | loads, stores, atomics, `ldmatrix` and `stmatrix` |
| `products.py` | `wgmma` and `mma` |
| `copies.py` | branches, barriers, `cp.async`, tensor copies |
| `races.py` | accesses to shared memory that no barrier orders |
| `run.py` | a compiled program and its inputs → its outputs |

Programs of compute capability 8.0 to 9.0, one thread block a program. Left out: tensor memory (10.0 and later), and
clusters.
"""
