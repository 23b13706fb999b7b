"""Tensor operations: each a PyTorch reference with its Triton kernel beside it."""
