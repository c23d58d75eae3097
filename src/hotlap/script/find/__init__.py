"""Finding the training of a script: its loop, and how long it goes on."""
