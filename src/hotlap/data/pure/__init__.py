"""Proofs that a dataset is pure: it gives the same sample for the same index, and fetching leaves no trace.

`proof` answers for a source; `follower` follows statements and expressions, `calls` what they call, `values` what they
read, all in the text that `syntax` finds. `known_calls` lists library calls that only compute; `read_state` watches
whether anything that was read changes.
"""
