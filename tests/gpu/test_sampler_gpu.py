"""Samples of a real GPU: the driver's figures, the card of the training, and capture beside the sampler."""

import torch
from plain import class_data
from sampling import sample_eagerly, when
from torch import nn

import hotlap
from hotlap import Job
from hotlap.fitting.live import gpu_of
from hotlap.store.telemetry import read_live, read_samples


def test_the_reader_of_a_training_is_that_of_its_card_and_has_the_figures_of_the_driver():
    reader, _ = gpu_of(torch.device("cuda"))
    held = torch.ones(2**28, device="cuda")
    found = reader.read(own=())
    assert found["name"] == torch.cuda.get_device_name()
    assert held.nbytes <= found["memory_used_bytes"] <= found["memory_bytes"]
    assert 0 <= found["busy"] <= 1


def test_a_captured_training_is_sampled_and_trains_as_without_a_sampler(monkeypatch, tmp_path):
    def trained(name, **settings):
        torch.manual_seed(0)
        job = Job(
            model=nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)),
            data=class_data(512, 20, dtype=torch.float32),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.AdamW(p),
            batch_size=32,
            epochs=20,
            device="cuda",
        )
        plan = {"kind": "resident", "mode": "captured", "optimizer": "fused"}
        return hotlap.fit(job, plan=plan, out=tmp_path / name, progress=False, **settings)

    plain = trained("plain")
    sample_eagerly(monkeypatch)
    sampled = trained("sampled", on_evaluation=lambda record: when(lambda: read_live(tmp_path / "sampled") is not None))
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), sampled.model.parameters(), strict=True))
    last = read_samples(tmp_path / "sampled")[-1]
    assert last["torch"]["allocated_bytes"] > 0
    assert last["gpus"][0]["memory_used_bytes"] > 0
