"""Many methods under one recipe, side by side."""
