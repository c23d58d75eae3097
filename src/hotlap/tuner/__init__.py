"""The tuner: after each step it decides on the plan for the next one."""
