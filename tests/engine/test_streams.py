"""The current stream, asked for cheaply: torch is asked once for each of them."""

import torch

from hotlap.engine.capture import recording as streams


def test_torch_is_asked_once_for_every_stream(monkeypatch):
    raw, asked = [7], []

    def current(device):
        asked.append((device.index, raw[0]))
        return object()

    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(streams, "_raw_stream", lambda index: raw[0])
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    device = torch.device("cuda", 1)
    first = streams.current_stream(device)
    assert streams.current_stream(device) is first
    raw[0] = 8
    assert streams.current_stream(device) is not first
    raw[0] = 7
    assert streams.current_stream(device) is first
    assert streams.current_stream(torch.device("cuda", 0)) is not first
    assert asked == [(1, 7), (1, 8), (0, 7)]


def test_a_device_without_a_number_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
    assert streams.current_stream(torch.device("cuda")) == "cuda"
