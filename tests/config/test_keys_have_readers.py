"""Each key is read by something: an option that nothing reads would be silently ignored.

A reader is an attribute access that names the section and the key (`config.training.steps`), or
the key of a name that was bound to the section in the same function (`options =
self.config.optimizer; options.lr`). A section that is handed over whole, as in
`f(**vars(config.section))`, is read whole: a function takes no argument that it does not name.
Keys that follow from others are read in derived.py for the trainer, by the functions that the
trainer calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.config.schema import all_keys, sections

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchtitan_lite"

# The loader reads its own file's name, and resolve() turns the alias into parallelism.zero_stage.
READ_BY_THE_ROOM_ITSELF = {
    "job.config_file",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.context_parallel_rotate_method",
}


def _dotted(node: ast.AST) -> str:
    """`self.config.training.steps` of an attribute chain; "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _bindings(function: ast.AST) -> dict[str, str]:
    """Names that a function binds to attribute chains, also several in one assignment."""
    bound: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            bound |= {_dotted(name): _dotted(chain) for name, chain in pairs if _dotted(chain)}
    return bound


def keys_read(text: str) -> Iterator[str]:
    """The keys that a source reads."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, functions)):
        bound = _bindings(function)
        for node in ast.walk(function):
            if isinstance(node, ast.keyword) and node.arg is None:
                handed_over = _dotted(getattr(node.value, "args", [node])[0])
                section = handed_over.rpartition("config.")[2]
                yield from (key for key in all_keys() if section and key.startswith(f"{section}."))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                first, _, rest = _dotted(node).partition(".")
                parts = f"{bound.get(first, first)}.{rest}".split(".")
                for before, part in enumerate(parts[1:]):
                    if parts[before] == "config" and part in sections():
                        yield ".".join(parts[before + 1 :])


def unread(sources: list[str]) -> list[str]:
    """The keys that none of the sources reads."""
    read = {key for text in sources for key in keys_read(text)} | READ_BY_THE_ROOM_ITSELF
    return [key for key in all_keys() if key not in read]


def _sources() -> list[str]:
    room = PACKAGE / "config"
    outside = [path for path in PACKAGE.rglob("*.py") if room not in path.parents]
    texts = [path.read_text(encoding="utf-8") for path in [*outside, ROOT / "train.py"]]
    derived = ast.parse((room / "derived.py").read_text(encoding="utf-8"))
    functions = [node for node in derived.body if isinstance(node, ast.FunctionDef)]
    used = [node for node in functions if any(f"{node.name}(" in text for text in texts)]
    return [*texts, *map(ast.unparse, used)]


def test_every_key_is_read_by_something() -> None:
    assert unread(_sources()) == []


def test_a_key_that_nothing_reads_is_named() -> None:
    source = (
        "def f(config):\n    options = config.optimizer\n    g(options.lr, config.debug.seed)\n"
    )
    left = unread([source])
    assert {"optimizer.lr", "debug.seed"}.isdisjoint(left)
    assert {"optimizer.eps", "debug.deterministic", "training.dataloader.num_workers"} < set(left)
    # Of the real sources, the file that reads the profiler's keys is needed.
    without = [text for text in _sources() if "profiler_warmup" not in text]
    assert "profiling.profiler_warmup" in unread(without)
