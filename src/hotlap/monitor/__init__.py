"""What this machine can do, what a step asks of it, and which of the two bounds the run; and how it does meanwhile.

`calibration` and `census` measure and count, `bound` says what bounds a step. `hardware` reads GPU and host, `sampler`
does so beside a training, `verdict` says what bounds that now, `conditions` what those of the host cost, and
`first_epoch` whether it goes as it promised.
`live_tensors` counts tensors as they come and go, `growing_memory` finds what keeps them, and `memory_watch` notices
beside a training that memory grows.
`findings` says what is wrong with a training; `aftermath` finds that in the files of a run, `outside` in a process.
`trainings` finds trainings by what they leave, `screen` makes lines of it, and `watch` shows them.
"""
