"""`--pictures` of the recipe price: the encoder sees files of pictures, and a row without one is answered too."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from picture_data import coloured_files
from recipe_data import FILLER, tiny_config, write_rows

import hotlap
from hotlap.core.errors import DataError, JobError, StoreError
from hotlap.recipes.answers import answer
from hotlap.recipes.options import options_of
from hotlap.recipes.price import RECIPE, PriceOptions
from hotlap.recipes.price_pictures import PictureBranch
from hotlap.recipes.training import train

pytest.importorskip("transformers")
pytest.importorskip("xgboost")
Image = pytest.importorskip("PIL.Image")
QUICK = {"epochs": 8, "vocabulary": 100, "most": 12, "lr": 5e-3, "plan": "off", "device": "cpu", "rounds": 20}
QUICK |= {"parts": 2, "size": 16, "dropout": 0.0, "patience": 8}
COLUMNS = ["title", "image", "price"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


def products(folder, rows=96, name="train.csv", gaps=(), seed=0):
    """Titles that tell nothing, and pictures that do: a red product costs ten times a blue one."""
    draw = np.random.default_rng(seed)
    told = []
    for at, (path, colour) in enumerate(coloured_files(folder / "pictures", rows, seed=seed)):
        price = (100 if colour == "red" else 10) * float(np.exp(0.05 * draw.normal()))
        told.append([" ".join(draw.choice(FILLER, 4)), gaps[at] if at < len(gaps) else f"pictures/{path}", price])
    return write_rows(folder / name, COLUMNS, told)


def options(data, **more):
    config = {"config": str(tiny_config(data.parent / "tiny.json"))}
    return options_of(PriceOptions, None, {"data": str(data), **QUICK, **config, **more})


def trained(data, out, lines=None, **more):
    said = [] if lines is None else lines
    return train(RECIPE, options(data, **more), out=out, retrain=False, say=said.append, progress=False)


def prices_in(path):
    with path.open() as file:
        return np.array([float(row.get("predicted_price") or row["price"]) for row in csv.DictReader(file)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on products of which three have no picture, and what was said."""
    folder, lines = tmp_path_factory.mktemp("finished"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
        data = products(folder, gaps=["", "pictures/none.png", "https://pictures.example/2.jpg"])
        yield trained(data, folder / "run", lines, pictures="image"), lines


def test_the_encoder_sees_pictures_and_rows_without_one_are_counted_before_the_training(finished):
    run, lines = finished
    report = json.loads((run / "report.json").read_text())
    assert report["models"]["encoder"]["smape"] < 0.5 * report["baselines"]["the median"]["smape"]
    counted = [at for at, line in enumerate(lines) if line.startswith("missing ") and "have no picture" in line]
    begun = next(at for at, line in enumerate(lines) if line.startswith("trees "))
    assert sum(int(lines[at].split()[1]) for at in counted) == 3
    assert max(counted) < begun
    assert any(line.startswith("pictures  ") for line in lines)
    assert not any("is not read" in line for line in lines)


def test_new_files_are_answered_by_their_pictures_and_rows_without_one_as_in_training(finished, tmp_path):
    run, lines = finished[0], []
    other = products(tmp_path / "there", 12, "test.csv", ["", "pictures/gone.png"], seed=3)
    answered = answer(run, other, tmp_path / "out.csv", say=lines.append, device="cpu")
    assert (answered.rows, answered.of) == (12, 12)
    found = prices_in(tmp_path / "out.csv")
    assert (found[3::2] > 40).all()
    assert (found[2::2] < 25).all()
    assert any(line.startswith("missing   2 of 12 rows have no picture") for line in lines)
    bare = write_rows(tmp_path / "bare.csv", COLUMNS[:2], [["of the", ""], ["in new", ""]])
    assert answer(run, bare, tmp_path / "bare-out.csv", say=lines.append, device="cpu").rows == 2
    print(lines[-4:])
    assert any(line.startswith("missing   2 of 2 rows have no picture") for line in lines)


def test_rows_in_memory_name_files_that_lie_anywhere(finished, tmp_path):
    model = hotlap.load(finished[0])
    coloured_files(tmp_path / "a", 1, classes=("red",))
    coloured_files(tmp_path / "b", 1, classes=("blue",))
    paths = [str(tmp_path / name / "000.png") for name in "ab"]
    red, blue, none = model.predict([{"title": "of the", "image": path} for path in [*paths, ""]], device="cpu")
    assert red > 2 * blue
    assert none > 0
    with pytest.raises(DataError, match="the rows lack image, which the model reads"):
        model.predict([{"title": "of the"}])


def test_a_run_answers_without_the_files_of_its_training(finished, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run")
    path = str(finished[0].parent / "pictures" / "001.png")
    before = hotlap.load(finished[0]).predict([{"title": "of the", "image": path}], device="cpu")
    assert hotlap.load(run).predict([{"title": "of the", "image": path}], device="cpu") == before
    state = json.loads((run / "recipe.json").read_text())
    state["reader"]["pictures"]["width"] = 3
    (run / "recipe.json").write_text(json.dumps(state))
    with pytest.raises(StoreError, match="damaged"):
        hotlap.load(run)


def looked(data, lines, **more):
    RECIPE(options(data, **more), lines.append).look()
    return lines


def test_files_that_are_there_are_offered_and_links_are_never_read(tmp_path):
    there = products(tmp_path / "there", 20)
    (note,) = [line for line in looked(there, []) if "is not read" in line]
    assert note.endswith("as 'pictures/000.png'; the files are there: --pictures reads them")
    shutil.rmtree(there.parent / "pictures")
    (note,) = [line for line in looked(there, []) if "is not read" in line]
    assert note.endswith("as 'pictures/000.png'")
    with pytest.raises(DataError, match=r"none of the .* files that .* names is there"):
        RECIPE.prepare(options(there, pictures="image"), [].append)
    links = products(tmp_path, 20, gaps=[f"https://pictures.example/{at}.jpg" for at in range(20)])
    with pytest.raises(DataError, match=r"pictures=image holds links, as .*; hotlap downloads nothing; name a column"):
        looked(links, [], pictures="image")
    empty = products(tmp_path, 20, gaps=[""] * 20)
    with pytest.raises(DataError, match=r"pictures=image holds no paths"):
        looked(empty, [], pictures="image")
    with pytest.raises(DataError, match="no column 'photo'"):
        looked(there, [], pictures="photo")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"root": "."}, "root='.' is the folder of pictures; name the column with --pictures"),
        ({"pictures": "image", "root": "nowhere"}, "root='nowhere' is the folder of pictures; name a folder"),
        ({"pictures": "image", "text": "image"}, "pictures=image is named for something else too"),
        ({"pictures": "image", "size": 4}, "size=4 must be from 16 to 1024"),
    ],
)
def test_options_of_pictures_that_will_not_do_are_refused(wrong, said):
    with pytest.raises(JobError) as error:
        options_of(PriceOptions, None, wrong)
    assert said in str(error.value)


def test_where_there_is_no_picture_the_pixels_do_not_count():
    torch.manual_seed(0)
    branch, has = PictureBranch(5), torch.tensor([1.0, 0.0])
    one, other = (branch(torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8), has) for _ in range(2))
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], torch.zeros(6))
    assert one[0, -1] == 1
