"""Many trainings: `hotlap.fit_many` of given jobs, `hotlap.search` for the best values of one job by Optuna.

| file | content |
| --- | --- |
| `many` | `fit_many` |
| `search`, `space`, `trials` | `search`: what may vary, and the trials on disk by Optuna |
| `trainings` | trains one after the other in this process, or several at once |
| `at_once` | how many at once are fastest, measured on copies of a job |
| `crews` | what trains several at once on which device |
| `processes` | forked processes that compute, on the CPU |
| `turns` | threads of this process that compute in turns, on a GPU |
"""
