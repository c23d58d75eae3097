"""Pictures decoded once: every kind of file, broken ones among them, and from the cache the second time."""

import io
import logging
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from hotlap.core.errors import DataError, StoreError
from hotlap.core.plan import Feed
from hotlap.data import pictures
from hotlap.data.dataset import as_source
from hotlap.data.feeds import open_feed
from hotlap.data.pictures import BrokenError, decode_square, decoded, list_broken
from hotlap.data.resident import ResidentFeeding, hold_on_device
from hotlap.store.cache import Cache

Image = pytest.importorskip("PIL.Image")
RED, GREEN, BLUE = (220, 30, 20), (20, 200, 40), (10, 20, 230)


def written(path, image, **how):
    image.save(path, **how)
    return path


def halves(left=RED, right=BLUE, size=(40, 24)):
    """A picture whose left and right halves differ."""
    image = Image.new("RGB", size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def content(image, kind, **how):
    made = io.BytesIO()
    image.save(made, kind, **how)
    return made.getvalue()


def corners(pixels):
    """Colours left, right, above, below, away from the edges."""
    side = pixels.shape[1]
    a, b = side // 4, 3 * side // 4
    return [pixels[:, b, a], pixels[:, b, b], pixels[:, a, a], pixels[:, a, b]]


def close(colour, wanted, within=6):
    return np.abs(np.asarray(colour, int) - wanted).max() <= within


# --- one picture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_is_a_square_in_rgb_with_channels_first(kind):
    pixels = decode_square(content(halves(), kind), 16)
    assert (pixels.shape, pixels.dtype) == ((3, 16, 16), np.uint8)
    left, right, *_ = corners(pixels)
    assert close(left, RED)
    assert close(right, BLUE)


def test_a_png_of_the_wanted_size_keeps_every_number():
    numbers = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    found = decode_square(content(Image.fromarray(numbers), "PNG"), 8)
    np.testing.assert_array_equal(found, numbers.transpose(2, 0, 1))


def test_stretching_keeps_all_of_a_picture_and_cropping_its_middle():
    wide = Image.new("RGB", (60, 20), GREEN)
    wide.paste(RED, (0, 0, 20, 20))
    wide.paste(BLUE, (40, 0, 60, 20))
    whole, middle = (decode_square(content(wide, "PNG"), 12, fit) for fit in ("stretch", "crop"))
    assert close(whole[:, 6, 1], RED)
    assert close(whole[:, 6, 10], BLUE)
    assert (middle == np.array(GREEN, np.uint8)[:, None, None]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_however_a_camera_was_held_the_picture_is_upright(kind, fit):
    from PIL import ImageOps

    colours = np.zeros((60, 40, 3), np.uint8)
    colours[:30, :20], colours[30:, 20:], colours[30:, :20] = RED, GREEN, BLUE
    given = Image.fromarray(colours)
    for camera in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = camera
        stored = content(given, kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(stored)))
        wanted = decode_square(content(upright.convert("RGB"), "PNG"), 16, fit)
        for mine, theirs in zip(corners(decode_square(stored, 16, fit)), corners(wanted), strict=True):
            assert close(mine, theirs.astype(int)), camera


def test_damaged_metadata_do_not_make_a_picture_broken():
    jpeg = content(halves(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + bytes(6))
    assert close(decode_square(jpeg, 16)[:, 8, 3], RED)


@pytest.mark.parametrize(
    ("mode", "kind", "wanted"),
    [
        ("L", "PNG", (80, 80, 80)),
        ("L", "JPEG", (80, 80, 80)),
        ("1", "PNG", (255, 255, 255)),
        ("P", "PNG", GREEN),
        ("CMYK", "JPEG", GREEN),
        ("LA", "PNG", (80, 80, 80)),
        ("RGBA", "PNG", GREEN),
    ],
)
def test_greys_palettes_and_inks_become_rgb(mode, kind, wanted):
    image = Image.new("RGB", (20, 20), (80, 80, 80) if mode in ("L", "LA") else "white" if mode == "1" else GREEN)
    pixels = decode_square(content(image.convert(mode), kind), 10)
    assert close(pixels[:, 5, 5], wanted, within=12)


def test_what_is_transparent_lies_on_white():
    clear = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    clear.paste((*RED, 255), (0, 0, 10, 20))
    left, right, *_ = corners(decode_square(content(clear, "PNG"), 16))
    assert close(left, RED)
    assert close(right, (255, 255, 255))


def test_sixteen_bits_are_brought_to_eight_and_not_cut_off():
    shades = Image.fromarray(np.full((8, 8), 0x8000, np.uint16))
    assert set(decode_square(content(shades, "PNG"), 8).reshape(-1).tolist()) == {0x80}


def test_both_decoders_of_jpeg_give_the_same_picture_but_for_rounding(monkeypatch):
    pytest.importorskip("simplejpeg")
    ramp = np.linspace(0, 255, 300 * 400 * 3).reshape(300, 400, 3).astype(np.uint8)
    jpeg = content(Image.fromarray(ramp), "JPEG", quality=95)
    fast = decode_square(jpeg, 32)
    monkeypatch.setattr(pictures, "fast_decoder", lambda: None)
    slow = decode_square(jpeg, 32)
    assert np.abs(fast.astype(int) - slow).max() <= 3


@pytest.mark.parametrize("fast", [True, False])
def test_damaged_files_say_what_is_wrong(monkeypatch, fast):
    if not fast:
        monkeypatch.setattr(pictures, "fast_decoder", lambda: None)
    jpeg, png = (content(halves(size=(200, 100)), kind) for kind in ("JPEG", "PNG"))
    for broken in (jpeg[: len(jpeg) // 2], png[: len(png) // 2], png[:60] + bytes(20) + png[80:]):
        with pytest.raises(BrokenError, match="cannot be decoded"):
            decode_square(broken, 8)
    for other in (b"words", b"GIF89a" + bytes(50), content(halves(), "BMP")):
        with pytest.raises(BrokenError, match="is neither JPEG nor PNG"):
            decode_square(other, 8)


def test_a_jpeg_that_the_fast_decoder_will_not_have_is_decoded_all_the_same():
    pytest.importorskip("simplejpeg")
    jpeg = content(halves(), "JPEG")
    rubbish = jpeg[:-2] + bytes(40) + jpeg[-2:]
    assert close(decode_square(rubbish, 16)[:, 8, 3], RED)


def test_the_first_of_several_pictures_of_a_camera_is_taken():
    first, second = halves(RED, GREEN), halves(BLUE, GREEN)
    both = content(first, "MPO", save_all=True, append_images=[second])
    assert close(decode_square(both, 16)[:, 8, 3], RED)


def test_a_picture_that_would_fill_the_memory_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 900)
    with pytest.raises(BrokenError, match=r"has 40 × 24 pixels, more than the 900"):
        decode_square(content(halves(), "PNG"), 8)
    # One that only says that it is vast: some bytes for 40 billion pixels.
    png = bytearray(content(Image.new("1", (16, 16)), "PNG"))
    png[16:24] = (200_000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(bytes(png[12:29])).to_bytes(4, "big")
    with pytest.raises(BrokenError, match="pixels"):
        decode_square(bytes(png), 8)


# --- many of them ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Six files, of which three are pictures."""
    (tmp_path / "in").mkdir()
    paths = [tmp_path / "in" / name for name in ("a.png", "b.jpg", "empty.png", "words.jpg", "c.png", "gone.png")]
    written(paths[0], halves(RED, GREEN))
    written(paths[1], halves(GREEN, BLUE), quality=95)
    paths[2].write_bytes(b"")
    paths[3].write_text("no picture at all")
    written(paths[4], halves(BLUE, RED))
    return paths


def test_rows_are_files_in_their_order_and_broken_ones_are_listed(files, tmp_path):
    seen = []
    found = decoded(files, size=8, cache=Cache(tmp_path / "cache"), progress=lambda *told: seen.append(told))
    assert found.pixels.shape == (6, 3, 8, 8)
    assert found.pixels.dtype is torch.uint8
    assert dict(found.broken) == {2: "is empty", 3: "is neither JPEG nor PNG", 5: "does not exist"}
    assert found.whole.tolist() == [0, 1, 4]
    for row, colour in ((0, RED), (1, GREEN), (4, BLUE)):
        assert close(found.pixels[row, :, 4, 1], colour)
    assert not found.pixels[[2, 3, 5]].any()
    assert seen[-1] == (6, 6)
    assert list_broken(files, found.broken) == (
        "empty.png is empty; words.jpg is neither JPEG nor PNG; gone.png does not exist"
    )


def test_what_is_no_file_to_read_says_what_it_is(files, tmp_path):
    (tmp_path / "in" / "gone.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    found = decoded([*files, tmp_path / "pipe.png"], size=8, cache=False)
    assert [found.broken[5], found.broken[6]] == ["is a folder", "is not a regular file"]


def test_a_long_name_is_cut_where_it_is_told():
    assert list_broken([f"in/{'x' * 5000}.png"], {0: "is empty"}) == f"{'x' * 59}… is empty"


def test_why_a_file_cannot_be_read_is_that_of_now_and_not_of_the_cache(files, tmp_path):
    cache = Cache(tmp_path / "cache")
    assert decoded(files, size=8, cache=cache).broken[5] == "does not exist"
    files[5].write_bytes(b"")
    assert decoded(files, size=8, cache=cache).broken[5] == "is empty"


def test_the_second_time_they_come_from_the_cache_and_stay_on_disk(files, tmp_path):
    cache = Cache(tmp_path / "cache")
    first, again = (decoded(files, size=8, cache=cache) for _ in range(2))
    assert (first.reused, again.reused) == (False, True)
    assert torch.equal(first.pixels, again.pixels)
    assert first.broken == again.broken
    assert "from the cache, which saved" in again.line
    assert "from the cache" not in first.line
    for one in (first, again):
        with Path("/proc/self/maps").open() as maps:  # where memory comes from
            mapped = [line for line in maps if int(line.split("-")[0], 16) <= one.pixels.data_ptr()][-1]
        assert "tensors.safetensors" in mapped
    assert [path.name for path in (tmp_path / "cache" / "pictures").iterdir()] == [cache.list("pictures")[0].key]


def test_writing_to_pixels_leaves_the_cache_as_it_is(files, tmp_path):
    cache = Cache(tmp_path / "cache")
    decoded(files, size=8, cache=cache).pixels.fill_(7)
    assert cache.verify() == []
    assert not (decoded(files, size=8, cache=cache).pixels == 7).all()


@pytest.mark.parametrize("change", ["content", "size", "fit", "order"])
def test_what_differs_is_decoded_anew(files, tmp_path, change):
    cache = Cache(tmp_path / "cache")
    decoded(files, size=8, cache=cache)
    if change == "content":
        stamp = files[0].stat()
        written(files[0], halves(RED, GREEN).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
        os.utime(files[0], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    given = list(reversed(files)) if change == "order" else files
    more = {"size": {"size": 12}, "fit": {"size": 8, "fit": "crop"}}.get(change, {"size": 8})
    assert not decoded(given, cache=cache, **more).reused


def test_the_same_files_under_other_names_are_known(files, tmp_path):
    cache = Cache(tmp_path / "cache")
    decoded(files[:2], size=8, cache=cache)
    moved = [path.rename(tmp_path / path.name) for path in files[:2]]
    assert decoded(moved, size=8, cache=cache).reused


def test_a_damaged_cache_entry_is_made_again(files, tmp_path, caplog):
    cache = Cache(tmp_path / "cache")
    right = decoded(files, size=8, cache=cache).pixels.clone()
    (file,) = (tmp_path / "cache").glob("pictures/*/tensors.safetensors")
    bytes_there = bytearray(file.read_bytes())
    bytes_there[-5] ^= 255
    file.write_bytes(bytes_there)
    with caplog.at_level(logging.WARNING):
        found = decoded(files, size=8, cache=cache)
    assert not found.reused
    assert "removed the damaged cache entry" in caplog.text
    assert torch.equal(found.pixels, right)


def test_without_a_cache_nothing_is_kept_and_that_is_said(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    found = decoded(files, size=8, cache=False)
    assert "not kept: cache=False" in found.line
    assert close(found.pixels[4, :, 4, 1], BLUE)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_to_stops_nothing(files, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    cache = Cache(tmp_path / "cache")
    (tmp_path / "cache" / "pictures").write_text("in the way")
    found = decoded(files, size=8, cache=cache)
    assert found.not_kept
    assert close(found.pixels[0, :, 4, 1], RED)


def test_a_disk_that_is_too_small_is_said_before_anything_is_decoded(files, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    monkeypatch.setattr(pictures, "decode_into", None)
    with pytest.raises(StoreError, match=r"decoding needs .* name another place with HOTLAP_CACHE"):
        decoded(files, size=8, cache=Cache(tmp_path / "cache"))
    assert list((tmp_path / "cache" / "pictures").iterdir()) == []


def test_processes_decode_as_one_does(files, tmp_path, monkeypatch):
    alone = decoded(files, size=8, cache=False)
    plain = pictures.parallel_map
    monkeypatch.setattr(pictures, "parallel_map", lambda f, items, **more: plain(f, items, workers=2, **more))
    both = decoded(files, size=8, cache=False)
    assert torch.equal(alone.pixels, both.pixels)
    assert alone.broken == both.broken


def test_files_that_are_all_broken_are_an_error_in_one_line(files):
    with pytest.raises(
        DataError, match=r"none of 3 files is a picture: empty\.png is empty; words\.jpg is neither JPEG"
    ):
        decoded([files[2], files[3], files[5]], size=8, cache=False)


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ("a.png", {}, "files is str 'a.png'; give a list of paths"),
        ([], {}, "files is empty"),
        (["a.png", 3], {}, r"files\[1\] is int 3"),
        (["a.png"], {"size": 0}, "size=0 must be a whole number"),
        (["a.png"], {"fit": "pad"}, "fit='pad' must be one of stretch, crop"),
    ],
)
def test_what_makes_no_sense_is_refused(given, more, said):
    with pytest.raises(DataError, match=said):
        decoded(given, **more)


def test_every_feed_gives_the_same_batches_of_them(files, tmp_path):
    found = decoded([files[0], files[1], files[4]] * 4, size=8, cache=Cache(tmp_path / "cache"))
    data = TensorDataset(found.pixels, torch.arange(12))
    source = as_source(Subset(data, [0, 2, 3, 5, 7, 8, 10]))
    pieces = [torch.tensor([6, 0, 3]), torch.tensor([1, 5, 2])]

    def batches(feeding):
        got = [batch.gathered() if hasattr(batch, "gathered") else batch for batch in feeding.pieces(pieces, 0)]
        feeding.close()
        return got

    cpu = torch.device("cpu")
    every = [
        open_feed(source, Feed(kind="loader")),
        open_feed(source, Feed(kind="loader", workers=1)),
        open_feed(source, Feed(kind="gather")),
        ResidentFeeding(hold_on_device(source, cpu), cpu),
    ]
    for feeding in every:
        for rows, (pixels, numbers) in zip(pieces, batches(feeding), strict=True):
            wanted = torch.tensor([0, 2, 3, 5, 7, 8, 10])[rows]
            assert torch.equal(numbers, wanted)
            assert torch.equal(pixels, found.pixels[wanted])
