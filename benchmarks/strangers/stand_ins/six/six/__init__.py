"""A stand-in for `six` on Python 3."""
