"""Search over settings on the validation images."""
