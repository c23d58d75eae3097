"""`hotlap.search`: many trainings of one job, each with other values, by Optuna; the best one's Run.

`space` says what may vary, `trials` keeps them on disk by Optuna, `search` trains them one after the other.
"""
