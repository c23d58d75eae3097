"""Scripts put together at random, run by plain PyTorch and by hotlap, and compared: see `__main__`."""
