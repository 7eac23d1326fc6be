"""Estimates of the time of compiled kernels, without the hardware that they are compiled for."""
