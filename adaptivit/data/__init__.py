"""Images and labels: where they come from, how they are preprocessed and augmented."""
