"""Checkpoints on disk and on the Hugging Face Hub: weights, configuration, model card, traces."""
