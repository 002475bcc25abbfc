"""SOAP and KL-SOAP as the formulas say it: dense NumPy, float64, one whole block."""

import numpy as np
from oracle import along


def rotate(x, bases, back=False):
    for axis, q in bases.items():
        x = along(x, q if back else q.T, axis)
    return x


def whitened(x, bases, values, relative):
    for axis, q in bases.items():
        w = values[axis]
        root = ((w + relative * w.max()) / w.mean()) ** -0.5
        x = along(x, root[:, None] * q.T, axis)
    return x


def in_old_places(old, values, vectors):
    """New columns less than 45 degrees from an old one take the old one's place."""
    order = [None] * len(old)
    for place, column in np.argwhere(abs(old.T @ vectors) >= 0.71):
        assert order[place] is None
        order[place] = column
    rest = iter(sorted(set(range(len(old))) - set(order)))
    order = [next(rest) if column is None else column for column in order]
    return values[order], vectors[:, order]


def soap(grads, *, b1, b2, b3, eps, every, start, form, kl, relative_eps, ignored,
         power, graft, graft_b2, graft_eps, drop, due=None, seen=None):  # fmt: skip
    """The directions.

    The average of the gradient is kept in the parameter's own coordinates, as
    Algorithm 3 of the paper has it. `due` and `seen` are the steps of refreshes and of
    statistics, where they are given.
    """
    shape = grads[0].shape
    axes = [k for k in range(len(shape)) if k not in ignored]
    factors = {k: np.zeros((shape[k], shape[k])) for k in axes}
    bases = {k: np.eye(shape[k]) for k in axes}
    values = {k: np.ones(shape[k]) for k in axes}
    d, v, ema, directions = np.zeros(shape), np.zeros(shape), np.zeros(shape), []
    told = 0
    for t, g in enumerate(grads, 1):
        taken = seen is None or t in seen
        told = t if seen is None else told + taken
        weight = 1 if b2 == 1 or drop else 1 - b2
        c = 1 if b2 == 1 or drop else 1 - b2**t
        for k in axes if taken else ():
            others = {j: q for j, q in bases.items() if j != k}
            h = whitened(g, others, values, relative_eps) if kl else g
            flat = np.moveaxis(h, k, 0).reshape(shape[k], -1)
            factors[k] = b2 * factors[k] + weight * flat @ flat.T
        now = t == start or (t > start and t % every == 0)
        now = now if due is None else t in due
        spread = 1 if b2 == 1 or drop else 1 - b2 ** max(told, 1)
        fresh = {k: np.linalg.eigh(factors[k] / spread) for k in axes}
        if now and form == "official":
            bases = {k: q for k, (_, q) in fresh.items()}
            values = {k: w for k, (w, _) in fresh.items()}
        d = b2 * d + weight * rotate(g, bases) ** 2
        v = graft_b2 * v + (1 - graft_b2) * g**2
        used = (b3 * ema + (1 - b3) * g) / (1 - b3 * b1 ** (t - 1)) if b1 else g
        ema = b1 * ema + (1 - b1) * g
        divided = rotate(used, bases) / ((d / c) ** power + eps)
        p = rotate(divided, bases, back=True)
        if graft == "adam":
            magnitude = used / (np.sqrt(v / (1 - graft_b2**t)) + graft_eps)
            p = p * np.linalg.norm(magnitude) / np.linalg.norm(p)
            p = magnitude if t < start else p
        directions.append(p)
        if now and form == "paper":
            fresh = {k: in_old_places(bases[k], *pair) for k, pair in fresh.items()}
            bases = {k: q for k, (_, q) in fresh.items()}
            values = {k: w for k, (w, _) in fresh.items()}
    return directions
