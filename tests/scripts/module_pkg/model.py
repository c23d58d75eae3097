from torch import nn

from .config import HIDDEN, N_FEATURES


def build_model():
    layers = []
    last = N_FEATURES
    for width in HIDDEN:
        layers += [nn.Linear(last, width), nn.SiLU()]
        last = width
    layers.append(nn.Linear(last, 1))
    return nn.Sequential(*layers)
