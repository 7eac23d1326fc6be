"""LLVM IR of each op, in the loop nests of the plan."""
