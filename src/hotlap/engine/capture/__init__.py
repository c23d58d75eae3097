"""Recording steps as CUDA graphs.

`fingerprint` sees what a recording depends on, `recording` records work and watches eager steps for what a replay would
get wrong, and `captured_step` decides which steps to record and replays them.
"""
