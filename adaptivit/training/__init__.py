"""Train a model: configuration, steps, losses, recipes, many processes, run directories."""
