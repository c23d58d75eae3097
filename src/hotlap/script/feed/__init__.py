"""The batches of a script's loaders, by any feed."""
