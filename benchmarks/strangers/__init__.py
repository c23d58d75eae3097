"""Public training scripts, unchanged, by themselves and under `hotlap run`; see `__main__`."""
