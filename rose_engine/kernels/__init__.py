"""Triton kernels, each with its torch twin beside it."""
