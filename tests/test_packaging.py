"""What holds of the repository as a whole: its weight at import, its floors, its size, its files.

Each law is a function that takes the root of a tree and returns its faults as lines. The claims
run it on this repository; their twins plant one fault in a small tree and expect it to be named.

`python -m pytest tests/test_packaging.py -s` prints the lines of code of each room.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torchtitan_lite"

# Who may know whom: a room imports only rooms of a lower number ...
FLOORS = [
    {"mesh", "device", "config", "launch"},
    {"models", "precision", "ops"},
    {"parallel", "models.families"},
    {"build", "checkpoint", "data", "optim", "observe", "loss"},
    {"trainer", "generate", "evaluate", "convert", "plan"},
    {"train", "scripts"},
]
# ... and these on its own floor: operators serve layers, a mesh is cut from a configuration, a
# model is built to run under a loss or from a checkpoint, an export has its tokenizer with it.
NEIGHBOURS = {
    ("models", "ops"),
    ("precision", "ops"),
    ("mesh", "config"),
    ("config", "device"),  # what it can run, asked before anything is started
    ("launch", "config"),
    ("launch", "device"),
    ("build", "loss"),
    ("build", "checkpoint"),
    ("checkpoint", "data"),
    ("trainer", "evaluate"),  # validation during training
}

# What a plain model knows nothing of, though most of it stands below.
PARALLEL_ROOMS = {"mesh", "device", "parallel"}
DISTRIBUTED = "torch.distributed"

FAMILIES = re.compile(r"llama|qwen|mi[sx]tral|starcoder|deepseek|gemma|olmo", re.IGNORECASE)
# Hugging Face's name of a rope scaling, which the layers of any family may use.
ROPE_TYPE = re.compile("llama3", re.IGNORECASE)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_PACKAGE_CODE_LINES = 9700

HEAVY = {"transformers", "datasets", "tensorboard", "wandb", "matplotlib"}
# What we import where it is not the distribution's own name: torch calls the one that is declared.
IMPORT_NAMES = {"tensorboard": "torch.utils.tensorboard"}


# --- reading a tree -----------------------------------------------------------------------------


def sources(root: Path, *places: str) -> Iterator[tuple[Path, str]]:
    """(path relative to root, text) of each Python file in the places that exist."""
    for place in places or (PACKAGE, "train.py", "scripts"):
        found = root / place
        for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            if path.is_file():
                yield path.relative_to(root), path.read_text(encoding="utf-8")


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room a module of this repository lies in; None for the package's own __init__."""
    top, _, inside = module.partition(".")
    if top != PACKAGE:
        return top
    if inside.startswith("models.families"):
        return "models.families"
    return inside.partition(".")[0] or None


def imports_of(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of each import, wherever in the file; `from a import b` is a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name])


def words_of(text: str) -> Iterator[tuple[int, str, ast.AST | None]]:
    """(line, word, parent) of each name and string; docstrings and comments speak freely."""
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not isinstance(parents[node], ast.Expr):
                yield line, node.value, parents[node]
        elif isinstance(node, ast.Name):
            yield line, node.id, None
        elif isinstance(node, ast.Attribute):
            yield line, node.attr, None
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield line, node.name, None
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield line, node.arg, None
        elif isinstance(node, ast.alias):
            yield line, node.name, None


# --- the laws -----------------------------------------------------------------------------------


def floor_faults(root: Path) -> list[str]:
    """Imports that climb, or reach over to a room of the same floor."""
    height = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    faults = []
    for path, text in sources(root):
        here = room_of(module_name(path))
        if here is None:
            continue
        if here not in height:
            faults.append(f"{path}: the room {here!r} stands on no floor")
            continue
        for line, name in imports_of(path, text):
            there = room_of(name) if name.split(".")[0] in (PACKAGE, "train", "scripts") else None
            if here == "models" and (there in PARALLEL_ROOMS or name.startswith(DISTRIBUTED)):
                faults.append(f"{path}:{line}: a model runs on one device, and imports {name}")
                continue
            allowed = there not in height or there == here or (here, there) in NEIGHBOURS
            if not allowed and height[str(there)] >= height[here]:
                faults.append(f"{path}:{line}: {here} imports {there}")
    return faults


def cuda_faults(root: Path) -> list[str]:
    return [
        f"{path}:{line}: {word!r}"
        for path, text in sources(root)
        if room_of(module_name(path)) not in ("device", "ops")
        for line, word, _ in words_of(text)
        if "cuda" in word.lower()
    ]


def family_faults(root: Path) -> list[str]:
    """A model family named outside its file; a default value in the configuration may name one."""
    faults = []
    for path, text in sources(root, PACKAGE, "train.py"):
        room = room_of(module_name(path))
        for line, word, parent in words_of(text):
            is_default = room == "config" and isinstance(parent, ast.AnnAssign)
            if room == "models":
                word = ROPE_TYPE.sub("", word)
            if FAMILIES.search(word) and room != "models.families" and not is_default:
                faults.append(f"{path}:{line}: {word!r}")
    return faults


def code_lines(text: str) -> int:
    """Lines that hold code: no blank line, comment or docstring."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENCODING, tokenize.ENDMARKER}
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def size_faults(root: Path, *, max_code_lines: int = MAX_PACKAGE_CODE_LINES) -> list[str]:
    faults, rooms = [], Counter[str]()
    for path, text in sources(root, PACKAGE):
        rooms[room_of(module_name(path)) or "__init__"] += code_lines(text)
        num_lines = text.count("\n")
        if num_lines > MAX_FILE_LINES:
            faults.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(
                        f"{path}:{node.lineno}: {node.name} has {length} lines, "
                        f"at most {MAX_FUNCTION_LINES}"
                    )
    table = "\n".join(f"{count:6d} {room}" for room, count in rooms.most_common())
    print(
        f"\nlines of code, docstrings and comments not counted\n{table}\n{rooms.total():6d} in all"
    )
    if rooms.total() >= max_code_lines:
        faults.append(
            f"{rooms.total()} lines of code, fewer than {max_code_lines} wanted:\n{table}"
        )
    return faults


def machine_path_faults(root: Path, names: list[str]) -> list[str]:
    """Lines that name a place outside the repository, where no other clone has anything."""
    # Written in pieces, so that this file keeps the law it states.
    place = re.compile(
        rb"(?<![\w.~-])/(?:wor" rb"k|roo" rb"t|opt/(?:pyp" rb"i|whee" rb"ls))/|\.\./share" rb"d\b"
    )
    faults = []
    for name in names:
        if not (root / name).is_file() or name.startswith("assets/text/"):
            continue
        for number, line in enumerate((root / name).read_bytes().splitlines(), start=1):
            if place.search(line):
                faults.append(f"{name}:{number}: {line[:120]!r}")
    return faults


def dependency_faults(root: Path) -> list[str]:
    """Declared and never imported, or imported by the package and never declared."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    runtime = [*project["dependencies"], *extras.get("wandb", []), *extras.get("plot", [])]
    declared = {Requirement(line).name for line in runtime}
    imported = {
        name
        for path, text in sources(root, PACKAGE, "train.py", "scripts", "tests")
        for _, name in imports_of(path, text)
    }
    used = {
        dist
        for dist in declared
        if any(f"{name}.".startswith(f"{IMPORT_NAMES.get(dist, dist)}.") for name in imported)
    }
    known = declared | sys.stdlib_module_names | {PACKAGE, "train", "scripts"}
    known |= {"triton"}  # torch brings it where there are devices for it
    undeclared = {
        f"{path}:{line}: {name.split('.')[0]} is imported and not declared"
        for path, text in sources(root)
        for line, name in imports_of(path, text)
        if name.split(".")[0] not in known
    }
    return sorted(f"{name} is declared and never imported" for name in declared - used) + sorted(
        undeclared
    )


def pin_faults(constraints: str, requirements: list[str]) -> list[str]:
    """Requirements without an exact version for this Python, and pins that only fit one machine."""
    pins: dict[str, str] = {}
    for line in constraints.splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                pins[pin.name.lower()] = str(pin.specifier)
    wanted = [Requirement(line) for line in requirements]
    faults = [
        f"{one.name} has no exact version: {pins.get(one.name.lower())}"
        for one in wanted
        if one.name != PACKAGE and not pins.get(one.name.lower(), "").startswith("==")
    ]
    return faults + [f"{name}{pin} names one build" for name, pin in pins.items() if "+" in pin]


# --- what importing costs -----------------------------------------------------------------------

PROBE = """
import json, sys, time
begin = time.process_time()
{body}
seconds = time.process_time() - begin
print("PROBE" + json.dumps([seconds, [name for name in sys.modules if "." not in name]]))
"""


def probe(body: str) -> tuple[float, set[str]]:
    """CPU seconds that a body takes in a fresh interpreter, and the top-level modules it leaves."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(body=body)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seconds, modules = json.loads(done.stdout.rpartition("PROBE")[2])
    return seconds, set(modules)


HELP = """
import runpy
sys.argv = ["train.py", "--help"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, f"exit code {stop.code}"
"""

# But that one which Triton's platforms alone can import, where a kernel is launched.
IMPORT_ALL = f"""
import importlib, pkgutil, {PACKAGE}
for module in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}."):
    if module.name != "{PACKAGE}.ops.kernels":
        importlib.import_module(module.name)
"""


def test_importing_the_configuration_takes_neither_torch_nor_numpy_nor_long() -> None:
    seconds, modules = probe(f"import {PACKAGE}.config")
    assert PACKAGE in modules
    assert not modules & {"torch", "numpy"}
    assert seconds < 0.3


def test_the_probe_sees_a_module_that_is_imported() -> None:
    assert "numpy" in probe("import numpy")[1]


def test_help_is_printed_without_torch_in_a_second() -> None:
    if not (ROOT / "train.py").exists():
        pytest.skip("no train.py")
    seconds, modules = probe(HELP)
    assert not modules & {"torch", "numpy"}
    assert seconds < 1.0


def test_importing_every_module_of_the_package_imports_no_heavy_library() -> None:
    _, modules = probe(IMPORT_ALL)
    assert not modules & HEAVY


# --- this repository keeps the laws -------------------------------------------------------------


def assert_none(faults: list[str]) -> None:
    assert not faults, "\n".join(["", *faults])


def tracked_files() -> list[str]:
    """Files that a commit of this tree would hold."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return listing.stdout.splitlines()


def test_no_room_imports_one_that_is_not_below_it() -> None:
    assert_none(floor_faults(ROOT))


def test_cuda_is_named_only_by_the_device_module_and_the_operators() -> None:
    assert_none(cuda_faults(ROOT))


def test_a_model_family_is_named_only_in_its_own_file() -> None:
    assert_none(family_faults(ROOT))


def test_files_functions_and_the_whole_package_stay_readable() -> None:
    assert_none(size_faults(ROOT))


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    names = tracked_files()
    if not names:
        pytest.skip("not a git checkout")
    assert_none(machine_path_faults(ROOT, names))


def test_every_dependency_is_used_and_every_import_is_declared() -> None:
    if not (ROOT / "train.py").exists():
        pytest.skip("no train.py")
    assert_none(dependency_faults(ROOT))


def test_constraints_pin_every_direct_dependency_to_versions_that_any_machine_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert_none(pin_faults(constraints, requirements))
    assert "torch==2.13.0" in constraints.splitlines()


@pytest.mark.parametrize("path", sorted(ROOT.glob("train_configs/*.toml")), ids=lambda p: p.name)
def test_every_shipped_recipe_is_valid_toml(path: Path) -> None:
    assert tomllib.loads(path.read_text(encoding="utf-8"))


# --- the twins: one planted fault each, which must be named -------------------------------------


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("models/layers.py", "from torchtitan_lite.parallel import tensor"),
        ("models/layers.py", "def late():\n    import torchtitan_lite.trainer"),
        ("models/layers.py", "from ..parallel.tensor import apply_tensor_parallel"),
        ("models/decoder.py", "from torchtitan_lite.models.families import registry"),
        ("models/decoder.py", "from torchtitan_lite.mesh import build_mesh"),
        ("models/init.py", "from torch.distributed.tensor import DTensor"),
        ("parallel/apply.py", "from torchtitan_lite import models\nfrom .. import build"),
        ("data/loader.py", "from torchtitan_lite.checkpoint.manager import Manager"),
        ("config/checks.py", "from torchtitan_lite.mesh import build_mesh"),
        ("attic/old.py", ""),
    ],
)
def test_an_import_that_climbs_is_named(tmp_path: Path, name: str, text: str) -> None:
    [fault] = floor_faults(plant(tmp_path, {f"{PACKAGE}/{name}": text}))
    assert name in fault


def test_imports_that_go_down_are_none_of_the_floors_business(tmp_path: Path) -> None:
    text = "import torch\nfrom torchtitan_lite.parallel.apply import a\nfrom .models import b"
    assert floor_faults(plant(tmp_path, {f"{PACKAGE}/build.py": text, "train.py": text})) == []


@pytest.mark.parametrize("text", ["torch.cuda.synchronize()", "f(device='cuda:0')", "is_cuda = 1"])
def test_cuda_in_another_room_is_named(tmp_path: Path, text: str) -> None:
    spoken = '"""Runs on cuda too."""  # cuda\n'
    files = {f"{PACKAGE}/loss.py": spoken + text, f"{PACKAGE}/device.py": text}
    assert len(cuda_faults(plant(tmp_path, files))) == 1
    assert cuda_faults(plant(tmp_path, {f"{PACKAGE}/loss.py": spoken})) == []


@pytest.mark.parametrize(
    "text", ["if name == 'llama3': pass", "class QwenPlan: pass", "def f(mixtral): pass"]
)
def test_a_family_in_another_room_is_named(tmp_path: Path, text: str) -> None:
    files = {
        f"{PACKAGE}/parallel/tensor.py": text,
        f"{PACKAGE}/models/families/some.py": text,
        f"{PACKAGE}/config/keys.py": 'class Model:\n    name: str = "llama3"\n    """Llama."""',
    }
    [fault] = family_faults(plant(tmp_path, files))
    assert "tensor.py" in fault


def test_what_is_too_long_is_named(tmp_path: Path) -> None:
    long_function = "def long():\n" + "    pass\n" * MAX_FUNCTION_LINES
    files = {f"{PACKAGE}/a.py": long_function, f"{PACKAGE}/b.py": "\n" * (MAX_FILE_LINES + 1)}
    first, second = size_faults(plant(tmp_path, files))
    assert "long has 81 lines" in first
    assert "b.py: 401 lines" in second
    assert "81 lines of code" in size_faults(tmp_path, max_code_lines=81)[-1]


def test_only_code_counts_as_code() -> None:
    text = '"""A lesson\n\nof three lines."""\n\n# a reason\nx = """one\ntwo"""\n\n\ndef f():\n'
    assert code_lines(text + '    """What."""\n    return (\n        1\n    )\n') == 6


def test_a_machines_path_is_named(tmp_path: Path) -> None:
    text = "fine: /tmp/x a/work/b https://host/work/\n" + "here: /wor" + "k/main\n"
    [fault] = machine_path_faults(plant(tmp_path, {"docs/a.md": text}), ["docs/a.md"])
    assert fault.startswith("docs/a.md:2")


def test_an_unused_and_an_undeclared_dependency_are_named(tmp_path: Path) -> None:
    toml = '[project]\ndependencies = ["torch>=2", "tyro"]\n'
    files = {"pyproject.toml": toml, f"{PACKAGE}/a.py": "import os, torch.nn\nimport einops.layers"}
    unused, undeclared = dependency_faults(plant(tmp_path, files))
    assert unused.startswith("tyro is declared")
    assert "einops is imported" in undeclared


def test_a_missing_pin_a_loose_pin_and_a_pinned_build_are_named() -> None:
    constraints = "# why\ntorch==2.13.0+cpu\nnumpy>=2\ntqdm==1; python_version < '3'\n"
    faults = pin_faults(constraints, ["torch>=2", "numpy", "tqdm"])
    assert [fault.split()[0] for fault in faults] == ["numpy", "tqdm", "torch==2.13.0+cpu"]


# --- the commands -------------------------------------------------------------------------------


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # MAKEFLAGS of the make that runs this suite must not reach the one under test.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


def test_make_alone_lists_every_target() -> None:
    listed = {line.split()[1] for line in make().stdout.splitlines()}
    assert listed == {"help", "train", "test", "test-all", "venv", "lint", "format", "clean"}


def fake_checkout(root: Path) -> Path:
    """The real Makefile over a .venv whose programs only print how they are called."""
    program = """#!/bin/sh
case "$*" in
    *device_count*) echo 3 ;;
    *dump_folder*) echo out ;;
    -c*) ;;
    *) echo "$(basename "$0")" "$@" ;;
esac
"""
    plant(root, {f".venv/bin/{name}": program for name in ("python", "torchrun")})
    for path in (root / ".venv" / "bin").iterdir():
        path.chmod(0o755)
    copied = ("Makefile", "pyproject.toml", "constraints.txt")
    return plant(root, {name: (ROOT / name).read_text() for name in copied})


def test_make_train_starts_the_ranks_config_and_flags_it_is_given(tmp_path: Path) -> None:
    arguments = ("train", "NPROC=4", "CONFIG=a.toml", "ARGS=--training.steps 20")
    command = "train.py --job.config_file a.toml --training.steps 20"
    printed = make(*arguments, cwd=fake_checkout(tmp_path)).stdout
    assert f"torchrun --standalone --nproc_per_node 4 {command}\n" in printed
    assert f"python {command}\n" in make(*arguments, "NPROC=1", cwd=tmp_path).stdout


def test_make_train_counts_the_devices_and_ends_with_where_to_look(tmp_path: Path) -> None:
    folder = fake_checkout(tmp_path)
    assert "out/checkpoint/" not in make("train", cwd=folder).stdout
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    printed = make("train", cwd=folder).stdout
    assert "torchrun --standalone --nproc_per_node 3 train.py" in printed
    for place in ("out/metrics.jsonl", "out/checkpoint/", "scripts/plot_run.py out"):
        assert place in printed


def test_make_train_that_fails_says_so_and_points_nowhere(tmp_path: Path) -> None:
    python = fake_checkout(tmp_path) / ".venv" / "bin" / "python"
    assert make("venv", cwd=tmp_path).returncode == 0
    python.write_text('#!/bin/sh\ncase "$1" in -c) exit 0 ;; esac\nexit 2\n')
    failed = make("train", "NPROC=1", cwd=tmp_path)
    assert failed.returncode == 2
    assert "metrics.jsonl" not in failed.stdout


def test_make_installs_once_with_the_constraints_and_again_when_they_change(tmp_path: Path) -> None:
    install = "python -m pip install --disable-pip-version-check -c constraints.txt -e .[dev]"
    assert install in make("venv", cwd=fake_checkout(tmp_path)).stdout
    assert install not in make("venv", cwd=tmp_path).stdout
    stamp = tmp_path / ".venv" / ".installed"
    os.utime(stamp, (0, 0))
    assert install in make("venv", cwd=tmp_path).stdout


def test_an_install_that_fails_is_tried_again(tmp_path: Path) -> None:
    python = fake_checkout(tmp_path) / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -c) exit 0 ;; esac\nexit 1\n')
    assert make("venv", cwd=tmp_path).returncode == 2
    assert make("venv", cwd=tmp_path).returncode == 2


def test_a_python_that_is_too_old_or_absent_is_refused_by_name(tmp_path: Path) -> None:
    root = fake_checkout(tmp_path)
    (root / ".venv" / "bin" / "python").unlink()
    plant(root, {"old": '#!/bin/sh\ncase "$1" in -c) exit 1 ;; esac\necho Python 3.8.1\n'})
    (root / "old").chmod(0o755)
    for name, said in (("./old", "./old is Python 3.8.1."), ("nosuch", "nosuch is not there.")):
        refused = make("venv", f"PYTHON={name}", cwd=root)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert "make venv PYTHON=python3.12" in refused.stderr


def test_ci_checks_style_before_it_runs_the_suite() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make (\S+)", script.read_text(), re.MULTILINE) == ["lint", "test"]
