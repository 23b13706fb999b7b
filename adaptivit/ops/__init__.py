"""Tensor operations: each a PyTorch reference; fast kernels go beside it."""
