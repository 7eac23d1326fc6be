"""llvmlite: from LLVM IR to machine code."""
