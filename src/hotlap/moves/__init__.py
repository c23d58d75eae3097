"""Moves: each proposes one change of plan that may make a training faster. One file each."""
