"""The kit: which batch, how many workers, where the memory goes, each by real steps of a training that is named."""
