"""Functions inside of `jax.shard_map` whose arrays several devices hold in parts: kernels between exchanges."""

from tilekern.distributed.collective_matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]
