"""Modules under the names that they have in both Pythons."""

import urllib.error
import urllib.parse
import urllib.request

__all__ = ["urllib"]
