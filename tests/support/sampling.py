"""Trainings whose sampler reads as often as it can, and a wait for what its thread does."""

import threading

from hotlap.monitor import sampler


def sample_eagerly(monkeypatch):
    """From here on a sampler reads without pause, and writes a state with each sample."""
    monkeypatch.setenv("HOTLAP_SAMPLES", "on")
    for name, value in (("FIRST_S", 0.0), ("EVERY_S", 0.001), ("LIVE_S", 0.0), ("MOST_COST", 1e9)):
        monkeypatch.setattr(sampler, name, value)


def when(condition):
    """Until a thread has done something; only a hang fails."""
    while not condition():
        threading.Event().wait(0.002)


def sampler_threads():
    """The threads of samplers that are there."""
    return [thread for thread in threading.enumerate() if thread.name == "hotlap samples"]
