"""Encoders of `transformers` with two thin layers each and weights of chance, and batches for them."""

import warnings

import torch

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
DISENTANGLED = {"relative_attention": True, "position_biased_input": False, "type_vocab_size": 0}
V3 = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
KINDS = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES),
    "xlm-roberta": ("XLMRoberta", SIZES),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "vocab_size": 50, "max_position_embeddings": 64},
    ),
    "electra": ("Electra", {**SIZES, "embedding_size": 16}),
    "deberta": ("Deberta", {**SIZES, **DISENTANGLED, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": ("DebertaV2", {**SIZES, **DISENTANGLED, "pos_att_type": "p2c|c2p", "conv_kernel_size": 3}),
    "deberta-v3": ("DebertaV2", {**SIZES, **DISENTANGLED, **V3}),
    "modernbert": (
        "ModernBert",
        {
            **SIZES,
            "local_attention": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "cls_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 2,
        },
    ),
    "mpnet": ("MPNet", SIZES),
}
ENCODERS = tuple(KINDS)
FUSED = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert")
"""Those that have fused attention too."""
WAYS = [(name, "eager") for name in ENCODERS] + [(name, "sdpa") for name in FUSED]


def tiny(name, attention="eager", *, head="ForSequenceClassification", **settings):
    """In training mode, and with dropout, as they are given out."""
    import transformers

    family, sizes = KINDS[name]
    config = getattr(transformers, f"{family}Config")(**{**sizes, "num_labels": 3, **settings})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        kind = getattr(transformers, f"{family}{head}")
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=attention).train()


def batch(width=12, *, padded=True, samples=4, seed=1):
    """Sentences; some of them shorter than the others where `padded`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (samples, width), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, width // 2 :] = 0
        mask[1, width - 1 :] = 0
    labels = torch.randint(3, (samples,), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
