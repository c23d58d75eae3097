"""Pictures that OpenCV reads come from memory the second time, as it alone gives them."""

import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from hotlap.script.feed import followed_pictures
from hotlap.script.feed.decoded_once import DecodedOnce

SHAPES = {"colour": (72, 96, 3), "grey": (72, 96), "with alpha": (72, 96, 4)}
LOADER = DataLoader([0])


def pixels(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def opencv(monkeypatch):
    """The real OpenCV if it is installed, else a module that reads by PIL; `reads` lists the files it has read."""
    reads = []
    try:
        import cv2

        own = cv2.imread
    except ImportError:
        cv2 = ModuleType("cv2")

        def own(path, flags=1):
            with followed_pictures._inside:  # by PIL alone
                try:
                    picture = Image.open(path)
                except OSError:
                    return None
                found = np.array(picture if flags == -1 else picture.convert("RGB" if flags else "L"))
            return found if found.ndim == 2 else np.ascontiguousarray(found[..., [2, 1, 0, *range(3, found.shape[2])]])

    def imread(*args, **kwargs):
        reads.append(args)
        return own(*args, **kwargs)

    monkeypatch.setattr(cv2, "imread", imread, raising=False)
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    cv2.reads = reads
    return cv2


@pytest.fixture
def once(opencv):
    one = DecodedOnce()
    one.begin_epoch(LOADER, 1, has_more=True)
    one.memory._compared_here = 100  # none is also read anew
    yield one
    one.close()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("flags", [(), (0,), (1,), (-1,)])
def test_the_second_time_the_array_comes_from_memory(opencv, once, tmp_path, kind, flags):
    file = str(tmp_path / "a.png")
    Image.fromarray(pixels(SHAPES[kind])).save(file)
    first, *others = [opencv.imread(file, *flags) for _ in range(3)]
    assert len(opencv.reads) == 1
    for one in others:
        assert (one.dtype, one.shape, one.strides) == (first.dtype, first.shape, first.strides)
        np.testing.assert_array_equal(one, first)
        one[:] = 0  # it is the script's own
    assert once.memory.counts.recalled == 2


def test_a_file_that_changes_and_other_flags_are_read_again(opencv, once, tmp_path):
    file = str(tmp_path / "a.png")
    for seed in range(2):
        Image.fromarray(pixels((72, 96, 3), seed)).save(file)
        assert opencv.imread(file).shape == (72, 96, 3)
        assert opencv.imread(file, 0).shape == (72, 96)
    assert len(opencv.reads) == 4


def test_what_is_no_picture_is_what_opencv_alone_says(opencv, once, tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    for name in ("a.png", "missing.png"):
        assert [opencv.imread(str(tmp_path / name)) for _ in range(2)] == [None, None]
    assert len(opencv.reads) == 4
    assert once.memory.pictures == 0


def test_small_pictures_and_other_ways_of_asking_are_left_alone(opencv, once, tmp_path):
    small, large = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    Image.fromarray(pixels((8, 8, 3))).save(small)
    Image.fromarray(pixels((72, 96, 3))).save(large)
    for _ in range(2):
        opencv.imread(small)
        opencv.imread(large, flags=1)
    assert len(opencv.reads) == 4
    assert once.memory.pictures == 0


def test_the_first_ones_are_also_read_anew_and_a_wrong_one_ends_it(opencv, once, tmp_path):
    once.memory._compared_here = 0
    file = str(tmp_path / "a.png")
    Image.fromarray(pixels((72, 96, 3))).save(file)
    first = opencv.imread(file)
    np.testing.assert_array_equal(opencv.imread(file), first)
    assert (len(opencv.reads), once.memory.counts.compared, once.memory.is_on) == (2, 1, True)
    start = once.memory._pixels_at
    once.memory._map[start : start + 9] = b"otherwise"
    np.testing.assert_array_equal(opencv.imread(file), first)
    assert not once.memory.is_on
    opencv.imread(file)
    assert len(opencv.reads) == 4


def test_a_library_that_is_imported_later_is_followed_from_the_next_epoch_on(opencv, monkeypatch):
    own = opencv.imread
    monkeypatch.delitem(sys.modules, "cv2")
    once = DecodedOnce()
    once.begin_epoch(LOADER, 1, has_more=True)
    assert opencv.imread is own
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    once.begin_epoch(LOADER, 1, has_more=True)
    assert opencv.imread is not own
    once.close()
    assert opencv.imread is own
