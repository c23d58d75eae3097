"""Ready systems: a file in, a model and predictions out; each a short file over hotlap's parts."""
