"""XGBoost and LightGBM as jobs: the run folder, ledger, cache and prediction that networks have.

- `job` holds `TreeJob`, what is to be trained, and `TreePlan`, how; `parameters` refuses what the library lacks.
- `data` holds `TreeData`: features that are quantised once and shared by folds, trials and targets.
- `files` holds `TreeFiles`: features larger than memory, read in pieces and quantised on disk.
- `libraries` is the one place that calls XGBoost and LightGBM: quantised data, boosters, files, what really ran.
- `growing` grows boosters in laps, so many at once; `choosing` times plans on them and keeps the fastest.
- `model` holds `TreeModel`: its files, which may be a stranger's, and its answers.
- `saving` keeps boosters as they are done, and reads what an interrupted training has left.
- `fit` joins them: from a `TreeJob` to a `TreeRun` and its folder.

A plan changes time and never the trees. Importing this room imports neither library.
"""

from hotlap.trees.data import TreeData
from hotlap.trees.files import TreeFiles
from hotlap.trees.fit import TreeRun, fit
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.model import TreeModel, load

__all__ = ["TreeData", "TreeFiles", "TreeJob", "TreeModel", "TreePlan", "TreeRun", "fit", "load"]
