"""Functions inside of `jax.shard_map` whose arrays several devices hold in parts: kernels between exchanges."""

from tilekern.distributed.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from tilekern.distributed.moe import apply_experts, moe
from tilekern.distributed.routing import route

__all__ = ["all_gather_matmul", "apply_experts", "matmul_reduce_scatter", "moe", "route"]
