"""The module calls of a script, made as a plan requires: eagerly or by replays."""
