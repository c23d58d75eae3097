"""What this machine can do, what a step asks of it, and which of the two bounds the run."""
