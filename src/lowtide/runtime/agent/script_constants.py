"""Parses a script with other values for constants: names that it assigns at its top level."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from lowtide.base.errors import UsageError


def with_constants(source: bytes, constants: Mapping[str, str], name: str) -> ast.Module:
    """The script's syntax tree with other values for its constants; line numbers stay the same.

    Args:
        source: the script's source.
        constants: Python expressions by the name of the constant.
        name: the script's name, for error messages.

    Raises:
        UsageError: if no statement at the top level assigns a given name (alone, not in a tuple), or if the script or a value
            cannot be parsed.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{name} is not valid Python: {error.msg} (line {error.lineno})") from None
    for constant, value in constants.items():
        found = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and _assigns(node, constant)]
        if not found:
            raise UsageError(f"{name} has no line `{constant} = ...` at its top level")
        for node in found:
            try:
                parsed = ast.parse(value, mode="eval").body
            except SyntaxError:
                raise UsageError(f"{constant}: {value} is not a valid Python expression") from None
            node.value = ast.copy_location(parsed, node.value or node)
            ast.fix_missing_locations(node)
    return tree


def _assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets) and node.value is not None
