"""The optimizer steps of a script, with clipping, shortcuts and backward passes."""
