"""`hotlap run`: find the training loop of an unchanged script while it runs, and apply plans to it.

From the first line of the script to its end:

- `running` runs the script in this process as `python train.py` does, inside a `Session`; `notebook` does so for the
  cells of a notebook. `patches` installs replacements of torch's functions and removes them in any order.
- `session` receives batches, calls and steps. `loop_finder` derives from them which optimizers, modules and loaders
  make up a loop. `run_length` estimates how many updates the loop makes.
- `training` makes the loop obey plans, as a `Rig` does. `tuning` connects it to the tuner and its gate.
- When nothing is left to try, `idle` only counts steps, and hotlap's patches are removed. It notices
  `torch.compile` in time to remove them first. `report` prints the result. `live` has it sampled, where the user names
  a folder. `advice` names lines that wait for the GPU. `lookout` looks at memory and weights every few seconds.
  `hangs` has another process say what a script waits for. `out_of_memory` makes a forward pass again in `pieces`.

One step of the loop:

1. `feed` brings the batch. `loader_proxy` replaces `iter(loader)`. `epoch` changes from one feed to another in the
   middle of an epoch. `index_batches` knows the next samples without drawing twice. `held_samples` fetches or keeps
   samples, and `feeds` makes batches of them. `device_copies` answers `.to(device)`. `evaluation_feed` does the same
   for evaluation loaders. `decoded_once` remembers pictures.
2. `calls` runs the forward pass, the loss and the backward pass. `call` makes the calls of a module: by `eager`, by
   `capture` (which records `graphs` and connects them to autograd by `autograd_bridge`), or, without gradients, by
   `evaluations`. `loss_replay` replays the loss, and `early_loss` copies it to the host early. `module_state` restores
   what trials change.
3. `update` runs clipping, the optimizer's step and `zero_grad`: `updates` chooses, `capture` records and replays.

`compare` runs a script without and with hotlap in turns.
"""
