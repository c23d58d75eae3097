"""What a script could do better, which hotlap only says."""
