"""A task: a data set, a model, how batches are drawn, and what is aimed at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.data import Dataset, load_images, load_text
from benchmarks.models import ByteTransformer, ConvNet

Batch = tuple[jax.Array, jax.Array]
TASKS = ("images", "text")


@dataclass(frozen=True)
class Task:
    """Everything about a training job but the optimizer.

    Attributes:
      name: `images` or `text`.
      dataset: the three splits.
      model: a Flax module from inputs to logits.
      take: `(split, index) -> (inputs, labels)`, traced.
      draw: `seed -> ` an endless iterator of index arrays `[batch]` into `train`.
      grid: the index array of an evaluation of a split.
      metric: `accuracy` (percent, higher is better) or `bits per byte` (lower).
      targets: `(shortest schedule, metric)` pairs, longest schedule first.
      steps: the default length of the schedule.
      weight_decay: on matrices only.
      clip: the largest norm of the whole gradient, or None.
    """

    name: str
    dataset: Dataset
    model: nn.Module
    take: Callable[[tuple[jax.Array, ...], jax.Array], Batch]
    draw: Callable[[int], Iterator[np.ndarray]]
    grid: Callable[[tuple[np.ndarray, ...]], np.ndarray]
    metric: str
    targets: tuple[tuple[int, float], ...]
    steps: int
    weight_decay: float
    clip: float | None

    def target(self, steps: int) -> float | None:
        """Returns the metric to reach on a schedule of that many steps."""
        return next((aim for least, aim in self.targets if steps >= least), None)

    def reached(self, metric: float, target: float) -> bool:
        """Says whether a metric is as good as the target."""
        return metric >= target if self.metric == "accuracy" else metric <= target


def make_task(name: str, path: Path | None = None, **changed: int) -> Task:
    """Builds a task by name, on its packaged data or on the user's file.

    The size of a `batch` may be `changed`.
    """
    if name == "images":
        return _images(load_images(path), **changed)
    return _text(load_text(path), **changed)


IMAGE_TARGETS = {"Fashion-MNIST": ((0, 91.5),), "MNIST-5k": ((0, 97.0),)}
TEXT_TARGETS = {"verses": ((1200, 2.25), (0, 3.0))}


def _images(dataset: Dataset, batch: int = 128) -> Task:
    pixels, labels = dataset.train
    mean, scale = pixels.mean(), pixels.std()

    def take(split: tuple[jax.Array, ...], index: jax.Array) -> Batch:
        images, classes = split
        return (images[index] - mean) / scale, classes[index].astype(jnp.int32)

    def draw(seed: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(labels))
            yield from order[: len(order) // batch * batch].reshape(-1, batch)

    return Task(
        name="images",
        dataset=dataset,
        model=ConvNet(classes=int(labels.max()) + 1),
        take=take,
        draw=draw,
        grid=lambda split: np.arange(len(split[1])),
        metric="accuracy",
        targets=IMAGE_TARGETS.get(dataset.name, ()),
        steps=1500 if len(labels) > 10_000 else 300,
        weight_decay=0.05,
        clip=None,
    )


def _text(dataset: Dataset, batch: int = 32, evaluated: int = 512) -> Task:
    model = ByteTransformer()
    window = model.context + 1  # the labels are the inputs one byte later

    def take(split: tuple[jax.Array, ...], index: jax.Array) -> Batch:
        rows = split[0][index[:, None] + jnp.arange(window)]  # [n] -> [n, window]
        return rows[:, :-1], rows[:, 1:].astype(jnp.int32)

    def draw(seed: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        while True:
            yield rng.integers(len(dataset.train[0]) - window, size=batch)

    def grid(split: tuple[np.ndarray, ...]) -> np.ndarray:
        last = len(split[0]) - window
        return np.linspace(0, last, min(evaluated, last // window)).astype(int)

    return Task(
        name="text",
        dataset=dataset,
        model=model,
        take=take,
        draw=draw,
        grid=grid,
        metric="bits per byte",
        targets=TEXT_TARGETS.get(dataset.name, ()),
        steps=400,
        weight_decay=0.1,
        clip=1.0,
    )
