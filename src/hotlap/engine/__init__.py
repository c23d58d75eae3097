"""One optimizer step done right under any plan.

`rig` is the training, and `protocol` what the tuner needs of it. `step_cache` creates the `step` of each plan, captured
by `capture`, with the `assists` that a plan can leave out. `cursor` brings windows of data, `evaluate` evaluates.
"""
