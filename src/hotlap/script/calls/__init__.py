"""The calls of a script's modules, made as a plan has them: eagerly or by replays."""
