"""Holds the package to the measures of the house style.

Code lines leave out docstrings, comments and blanks. A nested function is measured on
its own and, for its lines, with the function around it.
"""

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shampoo_optax"
SOURCES = {path.stem: path.read_text() for path in sorted(PACKAGE.glob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}

Function = ast.FunctionDef | ast.AsyncFunctionDef
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens(name: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(SOURCES[name]).readline)


def code_lines(name: str) -> set[int]:
    lines = set()
    for token in tokens(name):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Expr) and is_string(node.value):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def functions() -> Iterator[tuple[str, str, Function]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield name, f"{name}.{node.name}", node


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of functions inside it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Function):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def complexity(function: Function) -> int:
    total = 1
    for node in own_nodes(function):
        match node:
            case ast.If() | ast.IfExp() | ast.For() | ast.While() | ast.Assert():
                total += 1
            case ast.ExceptHandler() | ast.match_case():
                total += 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
            case ast.BoolOp():
                total += len(node.values) - 1
    return total


def percentile(values: dict[str, int], share: float) -> int:
    ranked = sorted(values.values())
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def over(values: dict[str, int], limit: int) -> dict[str, int]:
    return {key: value for key, value in values.items() if value > limit}


def imports(node: ast.AST) -> Iterator[str]:
    """Yields the package's modules that the module-level imports of a tree name."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ImportFrom(module="shampoo_optax") | ast.ImportFrom(level=1):
                parts = [child.module] if child.level and child.module else []
                yield from parts or [alias.name for alias in child.names]
            case ast.ImportFrom(module=str(module)):
                if module.startswith("shampoo_optax."):
                    yield module.split(".")[1]
            case ast.Import():
                for alias in child.names:
                    if alias.name.startswith("shampoo_optax."):
                        yield alias.name.split(".")[1]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If() | ast.Try():
                yield from imports(child)


def import_graph() -> dict[str, set[str]]:
    inner = {name: tree for name, tree in TREES.items() if name != "__init__"}
    return {name: set(imports(tree)) & set(inner) for name, tree in inner.items()}


def message_parts(error: ast.Raise, tree: ast.Module) -> list[str]:
    """Collects the literal text of an error; a bare name is looked up in its file."""
    message = error.exc.args[0]
    roots = [message]
    if isinstance(message, ast.Name):
        roots = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and any(ast.unparse(target) == message.id for target in node.targets)
        ]
    return [n.value for root in roots for n in ast.walk(root) if is_string(n)]


def test_file_length():
    lengths = {name: source.count("\n") for name, source in SOURCES.items()}
    assert not over(lengths, 450)
    assert statistics.median(lengths.values()) <= 220


def test_function_length():
    lines = {name: code_lines(name) for name in SOURCES}
    lengths = {
        f"{label}:{node.lineno}": len(
            lines[name] & set(range(node.lineno, node.end_lineno + 1))
        )
        for name, label, node in functions()
    }
    assert not over(lengths, 80)
    assert percentile(lengths, 0.95) <= 45, over(lengths, 45)
    assert statistics.median(lengths.values()) <= 10


def test_cyclomatic_complexity():
    values = {f"{label}:{n.lineno}": complexity(n) for _, label, n in functions()}
    assert not over(values, 15)
    assert percentile(values, 0.95) <= 7, over(values, 7)


def test_imports_are_shallow_and_without_cycles():
    graph = import_graph()

    def depth(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"import cycle: {' -> '.join((*above, name))}"
        return max(
            (1 + depth(other, (*above, name)) for other in graph[name]), default=0
        )

    assert {name: depth(name) for name in graph if depth(name) > 7} == {}


def test_no_import_inside_a_function():
    lazy = [
        f"{label}:{node.lineno}"
        for _, label, function in functions()
        for node in own_nodes(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not lazy


def test_few_suppressions():
    found = [
        f"{name}:{token.start[0]}: {token.string}"
        for name in SOURCES
        for token in tokens(name)
        if token.type == tokenize.COMMENT
        and any(
            mark in token.string for mark in ("noqa", "type: ignore", "pyright: ignore")
        )
    ]
    assert len(found) <= 5, found


@pytest.mark.parametrize("name", SOURCES)
def test_errors_name_their_argument(name):
    silent = [
        f"{name}:{node.lineno}"
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id == "ValueError"
        and not any("`" in part for part in message_parts(node, TREES[name]))
    ]
    assert not silent
