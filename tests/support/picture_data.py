"""Files of pictures for the recipe `image`."""

import numpy as np


def digits_folder(folder, count=None, size=32, shuffled=False):
    """The digits of scikit-learn as PNG files, a folder for each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target[:count]
    if shuffled:
        labels = np.random.default_rng(0).permutation(labels)
    for at, label in enumerate(labels):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        shades = Image.fromarray((digits.images[at] * 15.9).astype(np.uint8))
        shades.resize((size, size), Image.Resampling.BICUBIC).save(folder / str(label) / f"{at:04d}.png")
    return folder


def coloured_files(folder, count, classes=("blue", "red"), size=16, seed=0):
    """Noisy pictures of so many, by turns of these colours; their paths and colours."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    numbers, found = np.random.default_rng(seed), []
    for at in range(count):
        name = classes[at % len(classes)]
        pixels = numbers.integers(0, 120, (size, size, 3))
        pixels[..., {"red": 0, "green": 1, "blue": 2}[name]] += 100
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{at:03d}.png")
        found.append((f"{at:03d}.png", name))
    return found
