"""Several processes that share one training: each computes its part of every batch.

The process that calls `fit` is rank 0 and leads. It trains as ever, and keeps the run folder, the evaluations and the
checkpoints, which are those of one process. `leader` starts the other ranks, and tells them before each step which
window it is. `follower` is the life of such a rank. What they exchange is in `engine.exchange`.
"""
