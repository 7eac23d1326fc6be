"""Analyses of the block IR: they read a Func and change nothing."""
