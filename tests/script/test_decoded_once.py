"""Pictures decoded once: the script gets what PIL alone gives it, from memory where it was made before."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("PIL")
from PIL import Image, ImageDraw, ImageFile, ImageOps

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.tricks import DECODED_ONCE
from hotlap.data import picture_memory
from hotlap.data.picture_memory import State
from hotlap.script.feed import followed_pictures
from hotlap.script.feed.decoded_once import WHAT, DecodedOnce
from hotlap.script.run_length import RunLength
from hotlap.script.session import Session, Settings
from hotlap.store.run_folder import RunFolder

SIZE = (96, 72)
LOADER = DataLoader([0])


def noise(mode="RGB", size=SIZE, seed=0):
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    return Image.merge(mode, [Image.fromarray(np.ascontiguousarray(values[..., band])) for band in range(bands)])


def encoded(picture, kind="JPEG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def jpeg(seed=0, **options):
    return encoded(noise(seed=seed), **options)


@pytest.fixture
def once():
    one = DecodedOnce()
    one.begin_epoch(LOADER, 1, has_more=True)
    yield one
    one.close()


@pytest.fixture
def decodings(monkeypatch):
    """The pictures that PIL decodes, in the order of their calls."""
    seen, own = [], ImageFile.ImageFile.load

    def load(picture):
        if picture.tile:
            seen.append(picture.size)
        return own(picture)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    return seen


def facts(picture):
    exif = dict(picture.getexif())
    return picture.mode, picture.size, picture.info, picture.getpalette(), exif, picture.readonly, picture.tobytes()


WAYS = {
    "converted": lambda opened: opened.convert("RGB"),
    "converted by name": lambda opened: opened.convert(mode="L"),
    "resized": lambda opened: opened.resize((40, 30), Image.Resampling.BILINEAR),
    "converted and resized": lambda opened: opened.convert("RGB").resize((40, 30)),
    "resized twice": lambda opened: opened.resize(size=(40, 30), reducing_gap=2.0).resize((20, 20)),
    "resized, then converted": lambda opened: opened.resize((40, 30)).convert("YCbCr"),
    "to its own size": lambda opened: opened.convert("RGB").resize(SIZE),
    "loaded": lambda opened: opened.load() and opened,
    "cropped": lambda opened: opened.crop((3, 3, 40, 50)),
    "of a box": lambda opened: opened.convert("RGB").resize((20, 20), box=(3.0, 3.0, 50.0, 60.0)),
    "turned by its exif": lambda opened: ImageOps.exif_transpose(opened).convert("RGB"),
    "as small": lambda opened: opened.thumbnail((30, 30)) or opened,
    "drafted": lambda opened: opened.draft("L", (40, 30)) and opened.convert("RGB"),
    "with a matrix": lambda opened: opened.convert("RGB").convert("L", (0.5, 0.2, 0.1, 0.0)),
    "with dithering": lambda opened: opened.convert("1", dither=Image.Dither.NONE),
    "to a palette": lambda opened: opened.convert("P", palette=Image.Palette.ADAPTIVE, colors=8),
}


def exif():
    made = Image.Exif()
    made[0x0112] = 6
    return made


FILES = {
    "jpeg": lambda: jpeg(),
    "jpeg with exif": lambda: jpeg(exif=exif(), dpi=(10, 10)),
    "grey jpeg": lambda: encoded(noise("L")),
    "cmyk jpeg": lambda: encoded(noise("CMYK")),
    "png": lambda: encoded(noise(), "PNG"),
    "png with alpha": lambda: encoded(noise("RGBA"), "PNG"),
    "png with a palette": lambda: encoded(noise().convert("P"), "PNG"),
    "png with transparency": lambda: encoded(noise(), "PNG", transparency=(1, 2, 3)),
    "animated png": lambda: encoded(noise(), "PNG", save_all=True, append_images=[noise(seed=1)]),
    "webp": lambda: encoded(noise(), "WEBP", lossless=True),
    "bmp": lambda: encoded(noise(), "BMP"),
    "tiny": lambda: encoded(noise(size=(8, 8))),
}


def outcome(way, data):
    try:
        return facts(WAYS[way](Image.open(io.BytesIO(data))))
    except Exception as error:  # what PIL alone raises must be raised
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", FILES)
def test_every_way_of_making_a_picture_gives_what_pil_alone_gives(once, kind):
    data = FILES[kind]()
    for way in WAYS:
        with followed_pictures._inside:
            own = outcome(way, data)
        assert [outcome(way, data) for _ in range(3)] == [own] * 3, way
    assert once.memory.is_on


@pytest.mark.parametrize("way", ["converted", "resized", "converted and resized", "resized twice", "loaded"])
def test_the_second_time_nothing_is_decoded(decodings, way):
    once = DecodedOnce()
    once.begin_epoch(LOADER, 1, has_more=True)
    once.memory._compared_here = picture_memory.COMPARED_HERE  # none is also made anew
    for _ in range(3):
        facts(WAYS[way](Image.open(io.BytesIO(jpeg()))))
    once.close()
    assert decodings == [SIZE]
    assert once.memory.counts.recalled == 2


def test_a_picture_is_of_pils_own_class_and_says_so_before_its_pixels_are_used(once):
    for _ in range(2):
        made = Image.open(io.BytesIO(jpeg())).convert("RGB")
        assert isinstance(made, Image.Image)
        assert type(made).__name__ == "Image"
        assert (made.mode, made.size, made.width, made.height, made.format) == ("RGB", SIZE, *SIZE, None)
        made.load()
        assert type(made) is Image.Image


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        copy.copy,
        copy.deepcopy,
        lambda made: pickle.loads(pickle.dumps(made)),
        lambda made: made.crop((1, 1, 9, 9)),
        lambda made: made.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        lambda made: made.getpixel((3, 3)),
        lambda made: made.split()[1],
        lambda made: made.im.size,
        lambda made: made.getexif() and made,
        lambda made: made == noise(),
        lambda made: noise() == made,
        lambda made: made.close() or made.mode,
    ],
)
def test_any_use_of_it_gives_what_pil_alone_gives(once, use):
    def used():
        found = use(Image.open(io.BytesIO(jpeg())).convert("RGB"))
        return facts(found) if isinstance(found, Image.Image) else np.asarray(found).tolist()

    with followed_pictures._inside:
        own = used()
    assert [used() for _ in range(3)] == [own] * 3


def test_drawing_on_a_picture_changes_no_later_one(once):
    own = noise()
    data = encoded(own, "PNG")
    for _ in range(3):
        made = Image.open(io.BytesIO(data)).convert("RGB")
        assert made == own
        ImageDraw.Draw(made).rectangle((0, 0, 50, 50), fill=(255, 0, 0))
        made.putpixel((60, 60), (1, 2, 3))
        assert made != own


def test_a_file_that_changes_is_another_picture(once, tmp_path):
    file = tmp_path / "a.png"
    for seed in (1, 2, 1, 2):
        file.write_bytes(encoded(noise(seed=seed), "PNG"))
        with Image.open(file) as opened:
            assert opened.convert("RGB") == noise(seed=seed)
    assert once.memory.counts.recalled == 2


def test_a_broken_file_raises_where_it_does_without_hotlap_every_time(once, tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg()[:-2000])
    for _ in range(3):
        with Image.open(tmp_path / "a.jpg") as opened, pytest.raises(OSError, match="truncated"):
            opened.convert("RGB")
    assert once.memory.counts.recalled == 0


def test_settings_of_pil_that_change_decoding_make_other_pictures(once, monkeypatch):
    data = jpeg()[:-2000]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert Image.open(io.BytesIO(data)).convert("RGB").size == SIZE
    assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_scripts_files_are_left_as_pil_alone_leaves_them(once, tmp_path, kind):
    file = tmp_path / "a"
    file.write_bytes(encoded(noise(), kind) + b"more")

    def left(how):
        with file.open("rb") as stream:
            opened = Image.open(stream)
            how(opened)
            return stream.tell(), opened.fp, opened.tile, getattr(opened, "png", None)

    for how in (WAYS["converted"], WAYS["loaded"]):
        with followed_pictures._inside:
            own = left(how)
        assert [left(how) for _ in range(3)] == [own] * 3
    for _ in range(3):
        opened = Image.open(file)
        stream = opened.fp
        made = opened.convert("RGB")
        assert stream.closed
        file.rename(tmp_path / "b")  # its pixels are there without the file
        assert facts(made)[:2] == ("RGB", SIZE)
        assert facts(opened)[:2] == ("RGB", SIZE)
        (tmp_path / "b").rename(file)


def test_sizes_that_are_random_are_not_all_remembered_but_the_picture_before_is(once, decodings):
    once.memory._compared_here = picture_memory.COMPARED_HERE
    for side in range(20, 40):
        facts(Image.open(io.BytesIO(jpeg())).convert("RGB").resize((side, side)))
    assert once.memory.bytes_taken == 3 * (20 * 20 + 21 * 21 + SIZE[0] * SIZE[1])
    assert len(decodings) == 2 + 2  # the two first ones, and the third with what is kept of it


def test_where_memory_is_full_pil_makes_the_pictures(once):
    once.memory.most_bytes = 10
    for _ in range(2):
        assert facts(Image.open(io.BytesIO(jpeg())).convert("RGB"))[:2] == ("RGB", SIZE)
    assert (once.memory.bytes_taken, once.memory.counts.recalled) == (0, 0)


def test_a_wrong_picture_in_memory_is_found_and_nothing_is_recalled_any_more(once):
    data = encoded(noise(), "PNG")
    facts(Image.open(io.BytesIO(data)).convert("RGB"))
    start = once.memory._pixels_at
    once.memory._map[start : start + 9] = b"otherwise"
    assert Image.open(io.BytesIO(data)).convert("RGB") == noise()
    assert once.memory.state is State.DIFFERENT
    assert Image.open(io.BytesIO(data)).convert("RGB") == noise()


def test_where_memory_is_no_faster_nothing_is_recalled_any_more(once, monkeypatch):
    monkeypatch.setattr(picture_memory, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(picture_memory, "COMPARED_HERE", 64)
    for _ in range(picture_memory.ENOUGH + 3):
        assert facts(Image.open(io.BytesIO(jpeg())).convert("RGB"))[1] == SIZE
    assert once.memory.state is State.NO_FASTER
    assert once.memory.counts.recalled == picture_memory.ENOUGH


def test_afterwards_pil_is_as_before():
    def methods():
        return Image.Image.convert, Image.Image.resize, ImageFile.ImageFile.load

    before = methods()
    once = DecodedOnce()
    once.begin_epoch(LOADER, 1, has_more=True)
    assert methods() != before
    made = [Image.open(io.BytesIO(jpeg())).convert("RGB") for _ in range(2)]
    once.close()
    assert methods() == before
    assert made[0] == made[1]


def test_where_no_picture_comes_again_nothing_is_remembered_any_more():
    own = Image.Image.convert
    once = DecodedOnce()
    once.begin_epoch(LOADER, 1, has_more=True)
    for epoch in range(2):
        assert once.memory.is_on
        facts(Image.open(io.BytesIO(jpeg(seed=epoch))).convert("RGB"))
        once.begin_epoch(LOADER, 1, has_more=False)
    assert once.memory.state is State.ALWAYS_NEW
    assert Image.Image.convert is not own
    once.begin_epoch(LOADER, 1, has_more=False)
    assert once.is_over
    assert Image.Image.convert is own


def test_a_script_that_reads_no_picture_is_told_nothing_about_pictures(once):
    ledger = Ledger()
    for _ in range(3):
        once.begin_epoch(LOADER, 1, has_more=False)
    once.write_down(ledger, Plan())
    assert len(ledger) == 0
    assert once.is_over


def test_methods_of_pil_that_other_code_has_wrapped_are_followed_too(monkeypatch):
    def wrapped(own):
        return lambda *args, **kwargs: own(*args, **kwargs)

    for name in ("convert", "resize"):
        monkeypatch.setattr(Image.Image, name, wrapped(getattr(Image.Image, name)))
    once = DecodedOnce()
    once.begin_epoch(LOADER, 1, has_more=True)
    for _ in range(2):
        facts(Image.open(io.BytesIO(jpeg())).convert("RGB").resize((20, 20)))
    assert (once.memory.bytes_taken, once.memory.counts.recalled) == (20 * 20 * 3, 1)
    once.close()


def test_other_data_has_other_epochs(once):
    others = [DataLoader([seed]) for seed in range(4)]
    for seed, other in enumerate(others):
        facts(Image.open(io.BytesIO(jpeg(seed=seed))).convert("RGB"))
        once.begin_epoch(other, 1, has_more=False)
    assert once.memory.is_on


def test_data_that_is_made_anew_for_each_epoch_counts_as_coming_again():
    once = DecodedOnce()
    once.begin_epoch(DataLoader([1]), 1, has_more=False)
    assert not once.memory.is_on
    once.begin_epoch(DataLoader([1, 2]), 2, has_more=False)
    assert not once.memory.is_on
    once.begin_epoch(DataLoader([2]), 1, has_more=False)
    assert once.memory.is_on
    once.close()


# --- in a script ---------------------------------------------------------------------------


class Pictures(Dataset):
    """Files of pictures, cropped at random as they are read."""

    def __init__(self, folder, count=12):
        self.files = [folder / f"{n}.jpg" for n in range(count)]
        for n, file in enumerate(self.files):
            file.write_bytes(jpeg(seed=n))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        picture = Image.open(self.files[index]).convert("RGB").resize((48, 40))
        x, y = torch.randint(0, 8, (2,)).tolist()
        pixels = np.asarray(picture.crop((x, y, x + 32, y + 32)))
        return torch.from_numpy(pixels.copy()).float().mean((0, 1)) / 255, index % 2


def train(folder, epochs=3, workers=0):
    """The losses of a small training."""
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Pictures(folder), batch_size=2, shuffle=True, num_workers=workers)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def under_hotlap(tmp_path, monkeypatch, *, without=(), **how):
    """The losses of the same training in a session, and its last entry about pictures."""
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    with Session(Settings(name="test", out=tmp_path / "run", without=without)) as session:
        losses = train(tmp_path, **how)
    entries = [one for one in RunFolder.open(tmp_path / "run").read_ledger() if one.what == WHAT]
    return losses, entries[-1] if entries else None, session


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_gets_the_same_samples_and_decodes_each_picture_once(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(picture_memory, "LEAST_GAIN", 0.0)  # nothing hangs on the clock
    losses, entry, session = under_hotlap(tmp_path, monkeypatch, workers=workers)
    assert losses == train(tmp_path, workers=workers)
    assert entry.outcome == "kept"
    assert entry.figures["recalled"] == 24
    assert ("saved_s" in entry.figures) == (workers == 0)
    assert session._decoded.memory.bytes_taken == 12 * 48 * 40 * 3


def test_a_single_epoch_remembers_nothing(tmp_path, monkeypatch):
    losses, entry, session = under_hotlap(tmp_path, monkeypatch, epochs=1)
    assert losses == train(tmp_path, epochs=1)
    assert entry is None
    assert session._decoded.memory.bytes_taken == 0


def test_where_the_length_is_unknown_pictures_are_remembered_from_the_second_epoch_on(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_memory, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(RunLength, "known", False)
    _, entry, _ = under_hotlap(tmp_path, monkeypatch)
    assert entry.figures["recalled"] == 12


def test_pictures_that_do_not_fit_are_left_alone_and_the_ledger_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_memory, "SAMPLE", 2)
    monkeypatch.setattr(picture_memory, "LEAST_SHARE", 1e9)
    losses, entry, session = under_hotlap(tmp_path, monkeypatch)
    assert losses == train(tmp_path)
    assert (entry.outcome, entry.why) == ("rejected", "there are too many for the memory")
    assert session._decoded.memory.pictures == 2


def test_it_can_be_left_out(tmp_path, monkeypatch):
    _, entry, session = under_hotlap(tmp_path, monkeypatch, without=(DECODED_ONCE,))
    assert entry is None
    assert session._decoded is None
