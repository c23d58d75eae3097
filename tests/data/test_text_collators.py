"""What is shown of the collate functions of transformers, and of the samplers of accelerate."""

import copy

import pytest
import torch
from torch.utils.data import BatchSampler

from hotlap.data.pure.proof import prove
from hotlap.script.feed.index_batches import why_not_early

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models

    names = ["[PAD]", "[UNK]", "[MASK]", *(f"w{number}" for number in range(20))]
    whole = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def rows(**more):
    return [
        {"input_ids": [1, 2, 3][: 1 + i % 3], "attention_mask": [1] * (1 + i % 3)} | {k: f(i) for k, f in more.items()}
        for i in range(20)
    ]


def collators(tokenizer):
    label, tags = rows(label=lambda i: i % 2), rows(labels=lambda i: [0] * (1 + i % 3))
    fixed = [{"x": torch.ones(3), "label": i % 2} for i in range(20)]
    language = transformers.DataCollatorForLanguageModeling
    return {
        "padding": (label, transformers.DataCollatorWithPadding(tokenizer)),
        "to a multiple": (label, transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)),
        "default": (fixed, transformers.default_data_collator),
        "tokens": (tags, transformers.DataCollatorForTokenClassification(tokenizer)),
        "sequences": (tags, transformers.DataCollatorForSeq2Seq(tokenizer)),
        "language": (rows(), language(tokenizer, mlm=False)),
        "masked language": (rows(), language(tokenizer, mlm=True)),
    }


@pytest.mark.parametrize("name", ["padding", "to a multiple", "default", "tokens", "sequences", "language"])
def test_a_collator_that_only_pads_is_shown_to(tokenizer, name):
    samples, collate = collators(tokenizer)[name]
    was = copy.deepcopy(samples)
    collate(samples[:3])  # the first batch leaves an entry in the tokenizer
    proof = prove(samples, collate)
    assert proof.why_not_fixed is None
    collate(samples[4:9])
    assert proof.state.why_changed(thorough=True) is None
    if name != "default":
        assert samples == was
        tokenizer.padding_side = "left"
        try:
            assert proof.state.why_changed(thorough=True) == "'padding_side' has changed"
        finally:
            tokenizer.padding_side = "right"


def test_special_tokens_of_a_loaded_tokenizer_are_watched(tokenizer, tmp_path):
    """Loaded from files, they are objects of the library `tokenizers`."""
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded.add_special_tokens({"pad_token": transformers.AddedToken("[PAD]", special=True)})
    samples, collate = collators(loaded)["padding"]
    collate(samples[:3])
    proof = prove(samples, collate)
    assert proof.why_not_fixed is None
    token = loaded._special_tokens_map["pad_token"]
    assert type(token).__name__ == "AddedToken"
    assert proof.state.why_changed() is None
    token.content = "[MASK]"
    assert proof.state.why_changed() == "a value that it looks up has changed"


def test_a_collator_that_masks_at_random_is_refused(tokenizer):
    samples, collate = collators(tokenizer)["masked language"]
    collate(samples[:3])
    assert "draws from torch's generator" in prove(samples, collate).why_traces


def test_a_collator_is_followed_through_the_trainer_s_own(tokenizer):
    """The Trainer drops columns that its model does not take, and says so once."""
    from transformers.trainer_utils import RemoveColumnsCollator
    from transformers.utils import logging

    samples, inner = collators(tokenizer)["padding"]
    collate = RemoveColumnsCollator(inner, ["input_ids", "attention_mask", "label"], logging.get_logger("x"), "Model")
    collate(samples[:3])
    assert prove(samples, collate).why_not_fixed is None


def test_a_sampler_that_seeds_itself_may_be_read_ahead():
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = data_loader.SeedableRandomSampler(range(20), generator=torch.Generator())
    assert why_not_early(BatchSampler(sampler, 4, drop_last=False)) is None
    sampler = data_loader.SeedableRandomSampler(range(20), num_samples=7, generator=torch.Generator())
    assert "as it is read" in why_not_early(BatchSampler(sampler, 4, drop_last=False))
