"""The Triton backend, for NVIDIA GPUs.

chip         what the GPUs of a target can do
legalize     block IR → block IR whose every tile Triton has: sizes are powers of two, dots are matrix products
emit         legal block IR → `Program`: Triton source text, and all that is needed to launch it
compile      source text → machine code, kept on disk
call         machine code → a custom call in an XLA program
interpret    source text → results on NumPy arrays, in Triton's interpreter, without a GPU
"""
