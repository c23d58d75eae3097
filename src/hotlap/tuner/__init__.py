"""The tuner: told that a step has ended, it answers with the plan for the next."""
