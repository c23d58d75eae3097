"""A stand-in for `patoolib`, for scripts that import it and do not call it."""
