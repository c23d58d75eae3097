"""A stand-in for `reformer_pytorch`, for scripts that import it and do not call it."""


class LSHSelfAttention:
    """Only a name."""
