"""How a batch reaches the training.

`dataset` puts together what a training runs over: `sources` of samples (with `windows` and `sequences`), their `order`,
and one of the `feeds` or the `resident` one; `batches` reaches into batches. `pure` proves that data does not change.
`pictures` and `tokenising` prepare data once, with `parallel` and the cache, whose keys come from `content_keys`.
"""
