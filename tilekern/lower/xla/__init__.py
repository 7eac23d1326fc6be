"""The portable backend: plain XLA operations, on any platform of JAX.

calibration          numbers that were chosen: the size of a batch
plan.batching        which programs of the grid run at once
plan.memory_budget   refusal of Funcs whose values take too much memory
emit.emit_xla        blocks, control flow and the grid
emit.access          loads and stores as slices, or as gathers and scatters
emit.atomics         atomic updates
emit.ops             pure ops as functions of `jax.lax`
emit.debug           prints and assertions as callbacks
"""
