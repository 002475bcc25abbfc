"""Shampoo as the formulas say it: dense NumPy, float64, one block at a time."""

import itertools

import numpy as np


def merge(shape, limit, target, leading):
    if 0 in shape or target is None:
        return (0,) if 0 in shape else shape
    todo = [d for d in (shape if leading else shape[::-1]) if d != 1] or [1]
    done = [todo.pop(0)]
    while todo:
        side = todo.pop(0)
        if done[-1] * side <= limit and len(done) + 1 + len(todo) > target:
            done[-1] *= side
        else:
            done.append(side)
    return tuple(done if leading else done[::-1])


def blocks(merged, limit):
    """The index (a tuple of slices) of every block of a merged parameter."""
    for corner in itertools.product(*(range(0, d, limit) for d in merged)):
        yield tuple(slice(i, i + limit) for i in corner)


def root(factor, exponent, eps, relative, ridge, rtol):
    w, q = np.linalg.eigh(factor)
    if ridge == "pseudo":
        keep = w > rtol * max(w[-1], 0)
        return (q[:, keep] * w[keep] ** -exponent) @ q[:, keep].T
    rho = max(eps, relative * w[-1])
    if ridge == "after":
        w = w - min(w[0], 0) + rho
    else:
        w = w + rho + max(-w[0], 0)
    return (q * w**-exponent) @ q.T


def along(x, matrix, axis):
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, axis)), 0, axis)


def shampoo(shape, grads, *, b1, b2, b3, eps, relative_eps, every, start, correct,
            exponents, graft, graft_b2, graft_eps, size, target, leading,
            ridge="before", rtol=0.0, due=None, seen=None):  # fmt: skip
    """Directions of one parameter; a gradient may be `None`: nothing happens.

    `due` and `seen` are the steps of refreshes and of statistics, where they are given.
    """
    merged = merge(shape, limit := size or 2**31, target, leading)
    directions = [None if g is None else np.zeros(merged) for g in grads]
    for index in blocks(merged, limit):
        order, factors, roots, ema, v = len(merged), {}, {}, 0.0, 0.0
        told = 0
        for t, whole in enumerate(grads, 1):
            if whole is None:
                continue
            g = np.asarray(whole, np.float64).reshape(merged)[index]
            taken = seen is None or t in seen
            told = t if seen is None else told + taken
            fresh = t == start or (t > start and t % every == 0)
            fresh = fresh if due is None else t in due
            for k in range(order):
                e = exponents.get(order, {})
                e = e.get(k, 0.5 / order) if isinstance(e, dict) else e
                if e:
                    flat = np.moveaxis(g, k, 0).reshape(g.shape[k], -1)
                    weight = 1 if b2 == 1 else 1 - b2
                    if taken:
                        factors[k] = b2 * factors.get(k, 0.0) + weight * flat @ flat.T
                    if fresh:
                        c2 = 1 - b2**told if correct and b2 < 1 else 1.0
                        mean = factors[k] / c2
                        roots[k] = root(mean, e, eps, relative_eps, ridge, rtol)
            old, new = (1, 1) if graft == "adagrad" else (graft_b2, 1 - graft_b2)
            v = old * v + new * g * g
            now, ema = b3 * ema + (1 - b3) * g, b1 * ema + (1 - b1) * g
            now = g if b1 == 0 else now
            now = now / (1 - b3 * b1 ** (t - 1)) if correct and b1 else now
            v_hat = v / (1 - graft_b2**t) if graft == "adam" else v
            magnitude = now if graft == "sgd" else now / (np.sqrt(v_hat) + graft_eps)
            p = now
            for k, matrix in roots.items():
                p = along(p, matrix, k)
            if graft:
                p = p * (np.linalg.norm(magnitude) / (np.linalg.norm(p) + 1e-16))
                p = magnitude if t < start else p
            directions[t - 1][index] = p
    return [None if d is None else d.reshape(shape) for d in directions]


# ---- Newton–Schulz

QUINTIC = (3.4445, -4.775, 2.0315)


def polynomials(coefficients, steps):
    given = np.atleast_2d(coefficients)
    return [given[min(step, len(given) - 1)] for step in range(steps)]


def newton_schulz(matrix, coefficients, steps):
    """The iteration on singular values alone."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for polynomial in polynomials(coefficients, steps):
        values = sum(a * values ** (2 * k + 1) for k, a in enumerate(polynomial))
    return (left * values) @ right
