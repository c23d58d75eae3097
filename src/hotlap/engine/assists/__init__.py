"""Optimisations of captured steps that keep the numbers, each with a name by which a plan leaves it out."""
