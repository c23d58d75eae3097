"""Small data of the kinds that public scripts read, made from a seed: the same every time, and learnable."""

from __future__ import annotations

import csv
import datetime
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10
AT_ONCE = 4_000_000
"""Values that are made at once, so that large pictures need little memory."""


def make(name: str, to: Path, arguments: dict[str, Any]) -> None:
    """Make one kind of data in a folder."""
    to.mkdir(parents=True, exist_ok=True)
    MAKERS[name](to, **arguments)


def pictures(count: int, size: int, channels: int, seed: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Blurred blobs, one arrangement for each class, moved, dimmed and under noise; and their classes."""
    patterns = np.random.default_rng(11).random((classes, 8, 8, channels))
    times = -(-size // 8)
    large = patterns.repeat(times, axis=1).repeat(times, axis=2)[:, :size, :size]
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    found = np.empty((count, size, size, channels), np.uint8)
    rows_at_once = max(1, AT_ONCE // (size * size * channels))
    for begin in range(0, count, rows_at_once):
        part = large[labels[begin : begin + rows_at_once]]
        moved = random.integers(-size // 8, size // 8 + 1, (len(part), 2))
        rows = (np.arange(size) + moved[:, :1]) % size
        columns = (np.arange(size) + moved[:, 1:]) % size
        part = part[np.arange(len(part))[:, None, None], rows[:, :, None], columns[:, None, :]]
        light = random.uniform(0.5, 1.0, (len(part), 1, 1, 1))
        noise = random.standard_normal(part.shape, dtype=np.float32) * 0.2
        found[begin : begin + rows_at_once] = ((part * light + noise).clip(0, 1) * 255).astype(np.uint8)
    return found, labels


def mnist(to: Path, train: int = 60_000, test: int = 10_000) -> None:
    """Grey pictures of 28 by 28 in the idx files of MNIST, under MNIST/raw."""
    folder = to / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = pictures(count, 28, 1, seed)
        head = np.array([2051, count, 28, 28], ">i4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = np.array([2049, count], ">i4").tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.astype(np.uint8).tobytes())


def cifar(to: Path, train: int = 50_000, test: int = 10_000) -> None:
    """Coloured pictures of 32 by 32 in the pickled batches of CIFAR-10."""
    folder = to / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = pictures(train, 32, 3, 1)
    parts = [(f"data_batch_{n + 1}", images[n::5], labels[n::5]) for n in range(5)]
    parts.append(("test_batch", *pictures(test, 32, 3, 2)))
    for name, x, y in parts:
        rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": y.tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {n}" for n in range(CLASSES)]}))


def picture_folders(to: Path, train: int, test: int, size: int, classes: int = 5, test_name: str = "val") -> None:
    """JPEG files of several classes, one folder for each, under train and `test_name`; counts are per class."""
    from PIL import Image

    for part, count, seed in (("train", train, 1), (test_name, test, 2)):
        images, labels = pictures(count * classes, size, 3, seed, classes)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = to / part / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05d}.jpg", quality=90)


def loose_pictures(to: Path, train: int, test: int, size: int) -> None:
    """JPEG files without classes, under train and test."""
    from PIL import Image

    for part, count, seed in (("train", train, 1), ("test", test, 2)):
        (to / part).mkdir(parents=True)
        for number, image in enumerate(pictures(count, size, 3, seed)[0]):
            Image.fromarray(image).save(to / part / f"{number:05d}.jpg", quality=90)


def vocabulary(count: int) -> list[str]:
    """Made-up words, short ones first."""
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    found: list[str] = []
    number = 0
    while len(found) < count:
        rest, word = number, ""
        while True:
            rest, place = divmod(rest, len(syllables))
            word += syllables[place]
            if rest == 0:
                break
            rest -= 1
        found.append(word)
        number += 1
    return found


def sentences(words: int, vocab: int, seed: int) -> list[list[str]]:
    """Sentences of about 20 words: words are rare or frequent as in a language, and each has a few that follow it."""
    names = vocabulary(vocab)
    likely = np.random.default_rng(5)
    share = 1 / np.arange(2, vocab + 2)
    share /= share.sum()
    followers = likely.choice(vocab, (vocab, 8), p=share)
    random = np.random.default_rng(seed)
    drawn, follows = random.choice(vocab, words, p=share), random.random(words) < 0.6
    which, ends = random.geometric(0.4, words).clip(1, 8) - 1, random.random(words) < 0.05
    found: list[list[str]] = [[]]
    last = 0
    for n in range(words):
        last = int(followers[last, which[n]] if follows[n] else drawn[n])
        found[-1].append(names[last])
        if ends[n] and len(found[-1]) > 2:
            found.append([])
    return [one for one in found if one]


def text(words: int, vocab: int, seed: int = 1) -> str:
    """A sentence a line, with capitals and full stops."""
    return "".join(f"{' '.join(one).capitalize()} .\n" for one in sentences(words, vocab, seed))


def wikitext(to: Path, words: int, vocab: int, held_out: int) -> None:
    """train.txt, valid.txt and test.txt, as of wikitext-2."""
    for name, count, seed in (("train", words, 1), ("valid", held_out, 2), ("test", held_out, 3)):
        (to / f"{name}.txt").write_text(text(count, vocab, seed))


def text_file(to: Path, name: str, words: int, vocab: int, begin: str = "") -> None:
    """One file of text."""
    (to / name).write_text(begin + text(words, vocab))


def characters(to: Path, words: int, vocab: int) -> None:
    """train.bin, val.bin and meta.pkl of nanoGPT's character-level data."""
    whole = text(words, vocab)
    letters = sorted({*whole, *"abcdefghijklmnopqrstuvwxyz"})
    numbers = {letter: n for n, letter in enumerate(letters)}
    ids = np.array([numbers[letter] for letter in whole], np.uint16)
    cut = len(ids) * 9 // 10
    ids[:cut].tofile(to / "train.bin")
    ids[cut:].tofile(to / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": numbers}
    (to / "meta.pkl").write_bytes(pickle.dumps(meta))


def waves(to: Path, series: int = 100, length: int = 1000) -> None:
    """traindata.pt of time_sequence_prediction: sines of one frequency and many phases."""
    import torch

    phase = np.random.default_rng(2).integers(-80, 80, (series, 1))
    torch.save(np.sin((np.arange(length) + phase) / 20.0), to / "traindata.pt")


def hours(to: Path, rows: int = 17_420) -> None:
    """ETTh1.csv: seven series by the hour with days, weeks, drift and noise."""
    random = np.random.default_rng(3)
    at = np.arange(rows)
    phases, sizes = random.uniform(0, 6.28, (7, 2)), random.uniform(0.5, 4, (7, 2))
    drift = random.standard_normal((rows, 7)).cumsum(axis=0) * 0.03
    days = np.sin(at[:, None] * 2 * np.pi / 24 + phases[:, 0]) * sizes[:, 0]
    weeks = np.sin(at[:, None] * 2 * np.pi / 168 + phases[:, 1]) * sizes[:, 1]
    values = days + weeks + drift + random.standard_normal((rows, 7)) * 0.3
    begin = datetime.datetime(2016, 7, 1)  # noqa: DTZ001  hours without a zone, as in ETTh1
    with (to / "ETTh1.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"])
        for n, row in enumerate(values):
            writer.writerow([str(begin + datetime.timedelta(hours=n)), *(f"{value:.6f}" for value in row)])


def labelled_texts(to: Path, train: int, test: int, vocab: int, longest: int = 120) -> None:
    """train.csv and validation.csv: texts of several lengths of four classes, each with words of its own."""
    names = vocabulary(vocab + 80)
    marks = [names[vocab + 20 * n : vocab + 20 * n + 20] for n in range(4)]
    for part, count, seed in (("train", train, 1), ("validation", test, 2)):
        random = np.random.default_rng(seed)
        pool = [word for one in sentences(count * 45 + longest, vocab, seed) for word in one]
        with (to / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence", "label"])
            at = 0
            for _ in range(count):
                length = int(random.gamma(2.5, 16).__ceil__() if longest > 20 else random.integers(4, longest))
                length, label = min(max(length, 5), longest), int(random.integers(0, 4))
                words = pool[at : at + length]
                at = (at + length) % (len(pool) - longest)
                for place in random.integers(0, length, max(1, length // 8)):
                    words[place] = marks[label][int(random.integers(0, 20))]
                writer.writerow([" ".join(words), f"kind {label}"])  # numbers are no names of labels to transformers


def pairs(to: Path, train: int, test: int, vocab: int) -> None:
    """glue-mrpc.json for the stand-in of `datasets`: pairs of sentences that do or do not tell the same."""
    found = {}
    for part, count, seed in (("train", train, 1), ("validation", test, 2), ("test", test, 3)):
        random = np.random.default_rng(seed)
        all_of_it = [one for one in sentences(count * 60, vocab, seed) if len(one) > 8]
        rows = []
        for n in range(count):
            one, label = all_of_it[n % len(all_of_it)][:40], int(random.random() < 0.67)
            other = [*one] if label else [*all_of_it[int(random.integers(0, len(all_of_it)))][:40]]
            random.shuffle(other)
            rows.append({"sentence1": " ".join(one), "sentence2": " ".join(other), "label": label, "idx": n})
        found[part] = rows
    (to / "glue-mrpc.json").write_text(json.dumps(found))


def language_model(to: Path, kind: str, name: str, vocab: int, tokens: int, **sizes: int) -> None:
    """A folder NAME with a new model of `transformers` (`bert` or `roberta`, of base size) and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    marks = {
        "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    }[kind]
    pad, unknown, begin, end, mask = marks if kind == "bert" else (marks[1], marks[3], marks[0], marks[2], marks[4])
    numbers = {word: n for n, word in enumerate([*marks, ".", *vocabulary(vocab)])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1" if kind == "bert" else f"{begin} $A {end} {end} $B {end}",
        special_tokens=[(begin, numbers[begin]), (end, numbers[end])],
    )
    shown = ["input_ids", "token_type_ids", "attention_mask"] if kind == "bert" else ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        model_input_names=shown,
        **{"pad_token": pad, "unk_token": unknown, "cls_token": begin, "sep_token": end, "mask_token": mask},
    ).save_pretrained(to / name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=tokens,
        pad_token_id=numbers[pad],
        bos_token_id=numbers[begin],
        eos_token_id=numbers[end],
        max_position_embeddings=514 if kind == "roberta" else 512,
        type_vocab_size=1 if kind == "roberta" else 2,
        **sizes,
    )
    AutoModel.from_config(config).save_pretrained(to / name)  # without a head: the script's own is made anew


def roberta_texts(to: Path, train: int, test: int, vocab: int, tokens: int, longest: int, **sizes: int) -> None:
    """Labelled texts and a new RoBERTa."""
    labelled_texts(to, train, test, vocab, longest)
    language_model(to, "roberta", "roberta-base", vocab + 80, tokens, **sizes)


def bert_pairs(to: Path, train: int, test: int, vocab: int, tokens: int, **sizes: int) -> None:
    """Pairs of sentences and a new BERT."""
    pairs(to, train, test, vocab)
    language_model(to, "bert", "bert-base-cased", vocab, tokens, **sizes)


MAKERS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        mnist,
        cifar,
        picture_folders,
        loose_pictures,
        wikitext,
        text_file,
        characters,
        waves,
        hours,
        roberta_texts,
        bert_pairs,
    )
}


def name_of(maker: str, into: str, arguments: dict[str, Any]) -> str:
    """A folder name for data that is made once and shared."""
    whole = json.dumps([maker, into, arguments], sort_keys=True)
    return f"{maker}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
