"""Functions inside of `jax.shard_map` whose arrays several devices hold in parts: kernels between exchanges."""

from tilekern.distributed.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from tilekern.distributed.cross_entropy import vocab_parallel_cross_entropy
from tilekern.distributed.moe import apply_experts, moe
from tilekern.distributed.routing import (
    balanced_bias,
    limit_capacity,
    load_balancing_loss,
    route,
    router_z_loss,
)
from tilekern.distributed.sample import vocab_parallel_sample_hidden
from tilekern.distributed.sequence_parallel import (
    BytesSent,
    attention_bytes,
    from_zigzag,
    ring_attention,
    to_zigzag,
    ulysses_attention,
)

__all__ = [
    "BytesSent",
    "all_gather_matmul",
    "apply_experts",
    "attention_bytes",
    "balanced_bias",
    "from_zigzag",
    "limit_capacity",
    "load_balancing_loss",
    "matmul_reduce_scatter",
    "moe",
    "ring_attention",
    "route",
    "router_z_loss",
    "to_zigzag",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_sample_hidden",
]
