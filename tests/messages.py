"""The messages of the package and of what it stands on, as their source has them, with ``…`` for what varies."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_pgroup import errors
from tests.scripts import ROOT

ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.PGroupError)}
LOGGED = re.compile(r"(\w+\.)*_?(logger\.warning|warnings\.warn)")


def template(node: ast.AST) -> str | None:
    """The text of a string, an f-string, or several of them with ``+`` between; ``None`` for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sdr]|%\.\df", "…", text)
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            texts = template(left), template(right)
            return None if None in texts else "".join(texts)
    return None


def templates(*folders: Path) -> set[str]:
    """All texts in the Python files of these folders."""
    found = set()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            found.update(text for node in ast.walk(ast.parse(path.read_text())) if (text := template(node)))
    return found


def raised_and_logged() -> Iterator[str]:
    """What the package tells its users at run time: the messages of its own exceptions, and its warnings."""
    for path in sorted((ROOT / "lightning_pgroup").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                is_told = name.rpartition(".")[2] in ERRORS or LOGGED.fullmatch(name)
                if is_told and node.args and (text := template(node.args[0])):
                    yield text


def pieces(text: str) -> list[str]:
    """What does not vary in a message, piece by piece."""
    return [piece for part in text.split("…") if len(piece := " ".join(part.split()).strip(" .:,;'\"`()[]")) > 3]
