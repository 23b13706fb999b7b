"""Run a model on data: accuracy, cost, predictions, dense features, time."""
