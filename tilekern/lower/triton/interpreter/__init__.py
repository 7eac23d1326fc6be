"""Triton's interpreter, corrected: what the child process of `tilekern.lower.triton.interpret` runs.

wire         messages between the two processes
__main__     the child: receives a program, runs it, sends its results
launch       one launch: buffers, arguments, the programs of the grid
memory       buffers at addresses of their own, every access to them checked
accesses     loads, stores and atomic operations on this memory
triton        Triton's own interpreter, and the corrections it needs
syntax       Python's control flow on tiles
floats       bfloat16 and float8, and conversions between numbers
arithmetic   maxima, dots, and functions that Triton's interpreter lacks
folds        reductions and scans
libdevice    CUDA's mathematical functions

Nothing here imports Triton by itself: it is an optional dependency, and it must find TRITON_INTERPRET=1 in the
environment, which only the child has. Modules get it as a `TritonInterpreter`.
"""
