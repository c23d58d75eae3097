"""Files that survive a crash and are safe to read even if they are untrusted.

`disk` holds the system calls of a save, `files` whole files and plans, `tensors` and `encoding` safetensors and JSON.
`manifest` checks folders, of which `checkpoints` and `cache` (with `keys`) are made. `run_folder` is the folder of one
run, and `telemetry` what it holds of a training that runs. `weights` reads and writes models, `archives` packs runs.
"""
