"""Nothing is lost: saving and resuming a training, stopping it on a signal, and recognising it again.

`saving` writes and restores checkpoints, `signals` stops a training after its step. `identity` compares two trainings,
with `fingerprint` for the content of code, functions and objects.

`hangs` notices a training that makes no progress: from `stacks` it says what is waited for, and it ends worker
`processes` that hang. Beside a script, `hang_reader` does so in a process of its own.
"""
