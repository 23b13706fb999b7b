"""Small helpers that know nothing of models: files, hardware, versions, coercion, plotting."""
