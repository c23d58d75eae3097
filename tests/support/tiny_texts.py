"""Works of the benchmarks on texts, so small that a CPU trains them in a second."""

import functools
import warnings

from benchmarks import texts

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
}
TEXTS = {"median": 20, "longest": 90, "vocabulary": 60}


def bert_work(**settings):
    """52 texts, so that four are left over of 6 batches of 8, with widths of 32, 64 and 96 by hand."""
    return texts.TextWork(
        **{
            "name": "BERT, tiny",
            "model": functools.partial(texts.bert, vocabulary=60, **SIZES),
            "data": functools.partial(texts.drawn, 52, **TEXTS),
            "batch": 8,
            "lr": 3e-3,
            "task": texts.CLASSES,
            "small": True,
            **settings,
        }
    )


def deberta():
    """The library scripts a few functions as it is loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        return texts.deberta(vocabulary=60, **SIZES, position_buckets=8)


def deberta_work(**settings):
    """The same with numbers."""
    return bert_work(
        **{
            "name": "DeBERTa, tiny",
            "model": deberta,
            "data": functools.partial(texts.drawn, 52, **TEXTS, numbers=texts.NUMBERS),
            "task": texts.PRICES,
            **settings,
        }
    )
