"""Nothing is lost: saving and resuming a training, stopping it on a signal, knowing it again."""
