"""The backend for CPUs by LLVM, `cpu:llvm`: its speed against the machine's peak, XLA, `jax.nn` and PyTorch.

peak         multiply-adds a second, measured on the machine; the contestants' rounds measure it again
attention    flash attention, forward
matmul       2048³
rows         softmax and RMS norm of 4096²
irregular    top-k, histograms, sums of segments, and a convolution
overhead     dispatch of a call, and the first call in a new process (`first_call`)
pytorch      PyTorch's attention, if it is installed: in a process and an environment of its own (`pytorch_child`)

Each round times all contestants of a case in turn; the median of the rounds' ratios is judged.
"""
