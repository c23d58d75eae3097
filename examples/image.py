"""From folders of pictures to predictions: python examples/image.py (some 10 s on a CPU, nothing is downloaded)."""

import csv
import random
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import hotlap

folder = Path(tempfile.mkdtemp(prefix="hotlap-image-"))

# 1. Pictures as you may have them: a folder for each class.
SHAPES = ("circle", "cross", "triangle")


def draw(shape: str, chance: random.Random) -> Image.Image:
    """A shape of any colour, somewhere on a ground of any other."""
    ground, colour = (tuple(chance.randint(*of) for _ in range(3)) for of in ((0, 100), (130, 255)))
    picture = Image.new("RGB", (48, 48), ground)
    left, top, side = chance.randint(2, 20), chance.randint(2, 20), chance.randint(18, 24)
    box, pencil = (left, top, left + side, top + side), ImageDraw.Draw(picture)
    if shape == "circle":
        pencil.ellipse(box, fill=colour)
    elif shape == "cross":
        pencil.line(box, fill=colour, width=5)
        pencil.line((left, top + side, left + side, top), fill=colour, width=5)
    else:
        pencil.polygon([(left, top + side), (left + side, top + side), (left + side // 2, top)], fill=colour)
    return picture


chance = random.Random(0)
for shape in SHAPES:
    (folder / "train" / shape).mkdir(parents=True)
    for number in range(120):
        draw(shape, chance).save(folder / "train" / shape / f"{number}.png")
(folder / "train" / "circle" / "broken.png").write_bytes(b"")  # it happens: such files are listed and left out

# 2. Others, named by a file, to be predicted.
(folder / "test").mkdir()
truth = [chance.choice(SHAPES) for _ in range(45)]
test = folder / "test.csv"
with test.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["path"])
    for number, shape in enumerate(truth):
        draw(shape, chance).save(folder / "test" / f"{number}.jpg")
        writer.writerow([f"test/{number}.jpg"])

# 3. Train. Here a very small ResNet; without `size`, `width` and `depth` one of 18 layers, at 224 pixels.
run = hotlap.train(
    "image", folder / "train", size=32, width=8, depth=1, epochs=10, batch_size=16, lr=5e-3, out=folder / "run"
)

# 4. Predict. The columns of the file come first, the answers behind them, in the order of the file.
answers = folder / "answers.csv"
hotlap.predict(run, test, answers, probabilities=True)
with answers.open(encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
right = sum(row["class"] == shape for row, shape in zip(rows, truth, strict=True))
print(f"{right} of {len(rows)} right; answers in {answers}, scores and pictures in {run}")
