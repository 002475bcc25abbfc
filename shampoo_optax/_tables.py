"""Aligned tables in human units, for terminals."""

from collections.abc import Sequence


def aligned(*rows: Sequence[str]) -> str:
    """Pads columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(first: str, *rest: str) -> str:
        cells = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
        return "  ".join(cells).rstrip()

    return "\n".join(line(*row) for row in rows)


def human(number: float, unit: str, base: int = 1000, prefixes: str = "kMGTPE") -> str:
    """Three digits and a prefix: `12.3 MFLOP`."""
    prefix = ""
    for larger in prefixes:
        if number < base:
            break
        number, prefix = number / base, larger
    digits = 0 if not prefix or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {prefix}{unit}"


def human_bytes(number: int) -> str:
    """Three digits and a binary prefix: `12.3 MiB`."""
    if number < 1024:
        return f"{number} B"
    return human(number, "iB", 1024, "KMGTPE")
