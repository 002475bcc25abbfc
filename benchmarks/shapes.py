"""Shapes of the parameters of well-known models, as Flax lays them out."""

import math

import numpy as np

Shapes = list[tuple[int, ...]]


def resnet50(classes: int = 1000) -> Shapes:
    """ResNet-50: convolution kernels are (height, width, in, out)."""

    def convolution(size: int, inputs: int, outputs: int) -> Shapes:
        return [(size, size, inputs, outputs), (outputs,), (outputs,)]

    shapes, inputs = convolution(7, 3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outer = 4 * width
            shapes += convolution(1, inputs, width) + convolution(3, width, width)
            shapes += convolution(1, width, outer)
            shapes += convolution(1, inputs, outer) if block == 0 else []
            inputs = outer
    return [*shapes, (inputs, classes), (classes,)]


def vit_s16(classes: int = 1000) -> Shapes:
    """ViT-S/16 for 224 x 224 pixels: attention kernels have an axis of heads."""
    layers, width, heads, hidden, tokens = 12, 384, 6, 1536, 197
    head = width // heads
    norm = [(width,), (width,)]
    attention = [(width, heads, head), (heads, head)] * 3
    attention += [(heads, head, width), (width,)]
    network = [(width, hidden), (hidden,), (hidden, width), (width,)]
    embedding = [(16, 16, 3, width), (width,), (1, 1, width), (1, tokens, width)]
    layer = norm + attention + norm + network
    return [*embedding, *layer * layers, *norm, (width, classes), (classes,)]


def gpt(width: int, layers: int, context: int, vocabulary: int = 50257) -> Shapes:
    """A GPT with the query, key and value in one kernel and tied embeddings."""
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    network = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    layer = norm + attention + norm + network
    return [(vocabulary, width), (context, width), *layer * layers, *norm]


MODELS = {
    "ResNet-50": resnet50(),
    "ViT-S/16": vit_s16(),
    "GPT-2 small": gpt(768, 12, 1024),
    "GPT 1.3B": gpt(2048, 24, 2048),
}

# What the suite measures: `MODELS` without the one whose state no laptop holds, and
# the byte-level GPT that runs are compared on.
SUITE = {
    "ResNet-50": resnet50(),
    "ViT-S/16": vit_s16(),
    "GPT-2 small": gpt(768, 12, 1024),
    "GPT 6x384": gpt(384, 6, 256, vocabulary=256),
}
# The same kinds of parameters, of a minute in all.
SMALL = {"small": [(4, 4, 1, 16), (3, 3, 16, 16), *gpt(16, 1, 8, vocabulary=32)]}


def count(shapes: Shapes) -> int:
    """Returns the number of parameters."""
    return sum(map(math.prod, shapes))


def as_matrices(shapes: Shapes) -> Shapes:
    """Makes each kernel one matrix, of all that merging can give the squarest."""
    return [shape if len(shape) < 2 else _squarest(shape) for shape in shapes]


def _squarest(shape: tuple[int, ...]) -> tuple[int, int]:
    cuts = range(1, len(shape))
    matrices = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts]
    return max(matrices, key=lambda sides: min(sides) / max(sides))


def as_torch(shapes: Shapes) -> Shapes:
    """Lays kernels of convolutions out as torch does, outputs and inputs first."""

    def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:1:-1], *shape[:2]) if len(shape) == 4 else shape

    return [turned(shape) for shape in shapes]


def draw(shapes: Shapes, seed: int) -> list[np.ndarray]:
    """Draws one gradient for each parameter, normal numbers in float32."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]
