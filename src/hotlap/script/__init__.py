"""The user's own script, unchanged and faster: its loop is found while it runs, and obeys plans from outside.

The way of a script:

- `running` runs it in this process as `python train.py` would, inside of a `Session`; `notebook` does so for the cells
  of a notebook. `patches` puts what stands in for torch's functions in and takes it out again, in any order.
- `session` hears of batches, calls and steps. `find` tells from these which optimizers, modules and loaders make up a
  loop (`finder`), and how many updates it will make (`loops`, `horizon`).
- The loop becomes a `training`, which obeys plans as a `Rig` does. `steering` drives the tuner with it: while laps are
  timed it only counts steps. `judging` is its gate, `busy` says how long the device computes for a step.
- When nothing is left to try, `resting` counts steps, and nothing of hotlap is in torch's way; it notices
  `torch.compile` in time to be gone. `telling` says at the end what came of it, `advise` which lines wait for the
  device.

The way of a step:

1. `feed`: the loader's batch. `serving` stands in for `iter(loader)`; `epoch` goes from one feed over to another in the
   middle of an epoch; `indices` knows which samples come next without drawing anything twice; `feeds` and `holding`
   make batches of them; `sending` answers `.to(device)`; `evaluating` does it for other loaders.
2. `calls`: the forward pass, the loss and the backward pass. `call` makes a module's calls: `eager`, or by `capture`
   with `graphs`; `evaluations` those without gradients. `endings` replays the loss too, `readings` copies it early.
3. `update`: clipping, the step of the optimizer, `zero_grad`: `updates`, by `capture` where it is recorded.

`comparing` runs a script without and with hotlap in turns.
"""
