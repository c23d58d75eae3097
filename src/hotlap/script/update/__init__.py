"""The steps of a script's optimizers, and what comes with them: clipping, shortcuts, backward passes."""
