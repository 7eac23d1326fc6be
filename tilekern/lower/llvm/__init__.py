"""Block IR → LLVM vector code for this machine's CPU, called by XLA through its foreign function interface."""
