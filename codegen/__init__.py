"""Kernels: graph operations to machine code, one folder per backend."""
