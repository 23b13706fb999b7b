"""How a block and a pass run: PyTorch, CPU, Triton, compiled, checkpointed, captured, exported."""
