"""Recording steps as CUDA graphs: what may be recorded, what it is made for, and the replays."""
