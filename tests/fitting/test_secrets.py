"""No secret of the environment or the command line is written to a run folder or the cache."""

import pytest

from hotlap.fitting.record import HIDDEN, secrets_of, start_record, without_secrets

ENVIRONMENT = {
    "HF_TOKEN": "tok-in-the-environment",
    "WANDB_API_KEY": "key-in-the-environment",
    "MY_PASSWORD": "pass word/in & environment",
    "DB_PWD": "pwd-in-the-environment",
    "DATABASE_URL": "postgres://me:url-pass-environment@host/db",
    "DEPLOY_KEY": "-----BEGIN KEY-----\nline-one-of-the-key\nline-two-of-the-key\n",
    "AWS_SECRET_ACCESS_KEY": "aws-in-the-environment",
}
WORDS = [
    "--token",
    "tok-on-the-line",
    "--api-key=key-on-the-line",
    "wandb.api_key=hydra-on-the-line",
    "--data",
    "https://me:url-pass-line@host/x",
    "-H",
    "Authorization: Bearer bearer-on-the-line",
    '{"secret": "json-on-the-line"}',
    "hf_abcdefghijklmnopqrstuv",
    "AKIAABCDEFGHIJKLMNOP",
    "tok-in-the-environment",
    "--run=x-key-in-the-environment-y",
    "pass%20word%2Fin%20%26%20environment",
    "line-two-of-the-key",
    "url-pass-environment",
    "--note",
    "plain words stay",
]
TELLING = [
    "in-the-environment",
    "on-the-line",
    "url-pass",
    "pass word",
    "pass%20",
    "line-one",
    "line-two",
    "hf_abc",
    "AKIA",
]

SCRIPT = """
import os, torch
from torch import nn
import hotlap
from hotlap.store.cache import Cache, key_of
from hotlap.store.cache import model_key, store_model
from plain import class_data, small_mlp

job = hotlap.Job(model=small_mlp(), data=class_data(16), loss=nn.CrossEntropyLoss(),
                 optimizer=lambda p: torch.optim.Adam(p), batch_size=8, epochs=2, device="cpu")
run = hotlap.fit(job, out="run", save_every=1, progress=False)
hotlap.fit(job, out="again", started_by=["me", "--token", os.environ["HF_TOKEN"]], progress=False)
cache = Cache("cache")
store_model(cache, model_key({"env": dict(os.environ)}, {}), run.model.state_dict(), run.history, {"model": "Net"})
cache.put("features", key_of(dict(os.environ)), values=1, facts={})
"""


def test_a_run_and_the_cache_hold_none(tmp_path, forks):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = forks.run("train.py", *WORDS, cwd=tmp_path, **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    files = [path for name in ("run", "again", "cache") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        content = path.read_bytes()
        for secret in TELLING:
            assert secret.encode() not in content, f"{secret} is in {path}"
    assert b"plain words stay" in (tmp_path / "run" / "started.json").read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--lr", "0.1", "--epochs=3"],
        ["hotlap", "demo", "--epochs", "3", "--device", "cpu"],
        ["module:job", "C:/data", "s3://bucket/path:1", "--path=/home/me"],
        ["false", "--compat", "1"],
    ],
)
def test_plain_words_stay_as_they_are(words):
    environ = {"TOKENIZERS_PARALLELISM": "false", "PWD": "/home/me", "PATH": "/bin", "MONKEY": "abc"}
    assert without_secrets(words, environ) == words


def test_short_values_hide_only_whole_words():
    assert without_secrets(["abcd", "xabcdx", "abc"], {"A_TOKEN": "abcd", "B_TOKEN": "abc"}) == [
        HIDDEN,
        "xabcdx",
        "abc",
    ]


def test_the_words_given_by_a_caller_are_hidden_too(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "something-secret")
    assert start_record(2, ["x", "something-secret"]) == {"words": ["x", HIDDEN], "call": 2}


def test_an_environment_without_secrets_has_none():
    assert secrets_of({"PATH": "/bin:/usr/bin", "HOME": "/root", "PWD": "/x/yyyyy", "OLDPWD": "/z/zzzzz"}) == set()
