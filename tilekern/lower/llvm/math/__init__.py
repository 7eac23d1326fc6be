"""Mathematical functions that LLVM has no instruction for."""
