"""A run folder keeps how a training was started, and none of the passwords and keys on its command line."""

import pytest

from hotlap.fitting.record import HIDDEN, without_secrets

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["-p", "hunter2"], ["-p", HIDDEN]),
        (["-P", "hunter2"], ["-P", HIDDEN]),
        (["--pw", "hunter2"], ["--pw", HIDDEN]),
        (["--pw=hunter2"], [f"--pw={HIDDEN}"]),
        (["--db-pw", "hunter2"], ["--db-pw", HIDDEN]),
        (["--db-pwd", "hunter2"], ["--db-pwd", HIDDEN]),
        (["db.pw=hunter2"], [f"db.pw={HIDDEN}"]),
        (["-u", "me:hunter2"], ["-u", HIDDEN]),
        (["npm_" + "a1B2" * 9], [HIDDEN]),
        (["--note", "npm_" + "a1B2" * 9], ["--note", HIDDEN]),
        (["--wandb", KEY], ["--wandb", HIDDEN]),
        ([KEY], [HIDDEN]),
        ([f"wandb={KEY}"], [f"wandb={HIDDEN}"]),
        (["wandb_v1_" + "a1B2" * 9], [HIDDEN]),
        (["https://hooks.slack.com/services/T000/B000/abc"], [HIDDEN]),
        (["--notify=https://discord.com/api/webhooks/1/abc"], [f"--notify={HIDDEN}"]),
        (["https://me.webhook.office.com/webhookb2/abc"], [HIDDEN]),
        (["https://hooks.zapier.com/hooks/catch/1/abc"], [HIDDEN]),
        (["https://api.telegram.org/bot12:abc/sendMessage"], [HIDDEN]),
        (["https://host/data.csv?a=1&sig=abc"], [f"https://host/data.csv?a={HIDDEN}"]),
        (["--data", "https://host/?access_token=abc"], ["--data", f"https://host/?access_token={HIDDEN}"]),
    ],
)
def test_a_password_or_key_on_the_command_line_is_hidden(words, kept):
    assert without_secrets(["train.py", *words], {}) == ["train.py", *kept]


@pytest.mark.parametrize(
    "words",
    [
        ["-p", "0.5"],
        ["-p", "3", "--lr", "0.1"],
        ["-u", "train.py"],
        ["--revision", KEY],
        [f"--commit={KEY}"],
        ["--data", "https://host/data.csv?version=2"],
        ["https://huggingface.co/me/model"],
        ["--pin-memory", "--power", "2", "--pwise", "yes"],
        ["--name", "mask_connections_of_a_network"],
    ],
)
def test_other_words_stay(words):
    assert without_secrets(["train.py", *words], {}) == ["train.py", *words]
