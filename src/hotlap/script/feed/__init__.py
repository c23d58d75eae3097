"""The batches of a script's loaders, by whichever feed is wanted."""
