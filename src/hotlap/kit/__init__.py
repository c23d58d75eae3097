"""Questions about a training, answered by its own updates: `batch`, `workers`, `memory`, `gpus` and `diagnose`.

`calls` takes a Job, or finds the training that a command line names, and asks one of these.

- `batch` and `memory` try both kinds of training through `savings.Trials`. `workers` tries feeds, in another order for
  each kind.
- A Job runs in this process: `bench` builds its rig, tries updates on it (`JobTrials`), and restores the job.
- A script runs in a new process for every try (`ScriptTrials`): `probe` starts it, `probe_process` watches it from
  inside, if asked under a plan of `hotlap run`.
- `search` finds the largest and the fastest batch; `start_size` chooses the size that it begins with.
- `samples` finds the longest samples of a dataset and times its transforms.
- `diagnosis_process` watches a script for what is wrong with it: `line_sampler` finds the lines that take its time,
  `call_watch` sees its calls of torch, and `other_ways` times its model otherwise. What they see is `observed`;
  `diagnose` judges it, and `remedies` writes the change as a diff.
- `update_watch` counts the memory of an update by its parts; `savings` predicts and tries what would lower the peak.
- `gpus` predicts times on other GPUs from the work of an update, which `monitor` counts.
"""
