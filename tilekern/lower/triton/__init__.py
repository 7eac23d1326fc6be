"""The Triton backend, for NVIDIA GPUs.

chip          hardware limits of each target
dtypes        names of dtypes in Triton
calibration   numbers that were chosen: default warps and stages, thresholds
legalize      block IR → block IR that Triton can express: sizes are powers of two, dots are matrix products
plan          TMA copies, partial sums, launch options
emit          legal block IR → Triton source text
build         legalize, plan and emit in this order: a Func → a `Program`, its source text and its launch
compile       source text → machine code, kept on disk
call          machine code → a custom call in an XLA program; `call_message` encodes its message to jaxlib
interpret     source text → results as NumPy arrays, by Triton's interpreter, without a GPU
ptx           machine code → results as NumPy arrays, by an interpreter of PTX, without a GPU
"""
