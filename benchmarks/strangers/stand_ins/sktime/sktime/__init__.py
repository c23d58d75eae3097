"""A stand-in for `sktime`, for scripts that import it and do not call it."""
