"""Triton's interpreter with corrections, run by the child process of `tilekern.lower.triton.interpret`.

wire                 messages between the two processes
__main__             the child: receives a program, runs it, sends its results
launch               one launch: buffers, arguments, the programs of the grid
memory               buffers at addresses of their own; every access is checked
triton_interpreter   Triton's own interpreter
corrections          applies all corrections:
  syntax             Python's control flow on tiles
  accesses           loads, stores and atomic operations on checked memory
  floats             bfloat16 and float8, conversions between numbers
  arithmetic         maxima, dots, and functions that Triton's interpreter lacks
  reductions         reductions and scans
  libdevice          CUDA's mathematical functions
  printing           prints in the user's format

No module imports Triton when it is loaded: Triton is an optional dependency, and at its import it must find
TRITON_INTERPRET=1 in the environment, which only the child has. Modules get it as a `TritonInterpreter`.
"""
