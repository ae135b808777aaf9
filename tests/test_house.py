"""The rules of the house: layers import downward, files and functions stay short, no path of one machine anywhere."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dpamoe", "kernels", "passes", "tests")
CORE = {
    "files",
    "spec",
    "sites",
    "modes",
    "program",
    "encode",
    "profile",
    "allocate",
    "checkpoint",
    "formats",
    "shards",
    "journal",
    "modules",
    "threshold",
    "presets",
}  # weights in, artifact out; extend with care
KERNELS, CORE_LAYER, PASSES, TOP = 1, 2, 3, 4
LAYER_NAMES = {KERNELS: "kernels", CORE_LAYER: "core", PASSES: "passes", TOP: "api and cli"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 40
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MACHINE_PATH = re.compile(r"""(?<![\w.~/})\]])/(?:work|root|tmp|home)(?=[/"'`])""")


def sources(*folders):
    """Yield (path below the root, its syntax tree) of every Python file in `folders`."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python file in {', '.join(folders)}"
    for path in found:
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"), str(path))


def product():
    """Yield every file that a user installs."""
    return sources("kernels", "passes", "dpamoe")


def package_of(path):
    """Dotted name of the package that relative imports in `path` start from, as parts."""
    parts = path.parent.parts
    return parts if parts[0] == "dpamoe" else ("dpamoe", *parts)


def imports(path, nodes):
    """Yield (line, absolute dotted name) of everything that the import statements among `nodes` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = package_of(path)
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((node.lineno, ".".join((*base, alias.name))) for alias in node.names)


def run_at_import(tree):
    """Yield the nodes that run when the file is imported: all but the bodies of functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, (*FUNCTIONS, ast.Lambda))]


def layer_of(name):
    """Layer of an absolute dotted name in `dpamoe`, by what stands behind the first dot."""
    part = (*name.split("."), "")[1]
    return CORE_LAYER if part in CORE else {"kernels": KERNELS, "passes": PASSES}.get(part, TOP)


def module_of(path):
    """Dotted name of the module that a product file becomes."""
    return ".".join((*package_of(path), path.stem)).removesuffix(".__init__")


def report(violations):
    """Fail with every violation on a line of its own."""
    violations = sorted(violations)
    assert not violations, f"{len(violations)} against the rules:\n" + "\n".join(violations)


def test_layers_import_downward_only():
    report(
        f"{path}:{line}: {LAYER_NAMES[own]} must not import `{name}` of {LAYER_NAMES[layer_of(name)]}"
        for path, tree in product()
        for own in [layer_of(module_of(path))]
        for line, name in imports(path, ast.walk(tree))
        if name.split(".")[0] == "dpamoe" and layer_of(name) > own
    )


def test_kernels_import_torch_and_triton_only():
    allowed = sys.stdlib_module_names | {"torch", "triton", "dpamoe"}  # which part of dpamoe: the test above
    report(
        f"{path}:{line}: kernels must not import `{name}`"
        for path, tree in sources("kernels")
        for line, name in imports(path, ast.walk(tree))
        if name.split(".")[0] not in allowed
    )


def test_nobody_imports_the_bare_folders():
    report(
        f"{path}:{line}: write `dpamoe.{name}`, the bare name belongs to others"
        for path, tree in sources(*FOLDERS)
        for line, name in imports(path, ast.walk(tree))
        if name.split(".")[0] in ("kernels", "passes")
    )


def test_init_files_of_the_folders_hold_nothing_else():
    trees = {str(path): tree.body for path, tree in sources("kernels", "passes")}
    guard = trees["kernels/__init__.py"][1:]
    assert len(guard) == 1 and isinstance(guard[0], ast.If), "kernels/__init__.py: one docstring and the guard only"
    assert ast.unparse(guard[0].test) == "__name__ == 'kernels'" and not guard[0].orelse
    assert len(trees["passes/__init__.py"]) == 1, "passes/__init__.py: one docstring only"


def test_heavy_extras_are_imported_where_they_are_used():
    """`harness` defines a class of lm-eval's, so it imports lm-eval first of all, and nothing imports `harness` at import."""
    report(
        f"{path}:{line}: import `{name}` inside the function that needs it"
        for path, tree in product()
        for line, name in imports(path, run_at_import(tree))
        if name.split(".")[0] in ("lm_eval", "matplotlib", "gguf")
        and path.name != "harness.py"
        or name.startswith("dpamoe.harness")
    )


def test_product_raises_and_never_asserts():
    report(
        f"{path}:{node.lineno}: raise an error that says what to do, assert nothing"
        for path, tree in product()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    )


def test_files_say_what_they_are_for():
    report(
        f"{path}:1: the first line must be a docstring that says what the file is for"
        for path, tree in product()
        if not (ast.get_docstring(tree) and tree.body[0].lineno == 1 and tree.body[0].value.value.splitlines()[0].strip())
    )


def test_files_are_short():
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in product()}
    report(
        f"{path}:{length}: {length} lines, at most {LONGEST_FILE}: split by meaning"
        for path, length in lengths.items()
        if length > LONGEST_FILE
    )


def test_functions_are_short():
    report(
        f"{path}:{node.lineno}: `{node.name}` has {length} lines, at most {LONGEST_FUNCTION}: split by meaning"
        for path, tree in product()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and (length := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION
    )


def text_files():
    """Yield (path below the root, text) of every text file in the repository, those of `.ci` and `.git` excepted."""
    here = [path for path in ROOT.iterdir() if path.name != ".git"]  # a file in a second working tree
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted(path for path in [*here, *below] if path.is_file() and path.parent.name != "__pycache__"):
        try:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text


def test_no_file_holds_a_path_of_one_machine():
    report(
        f"{path}:{number}: path of one machine `{match.group()}`"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
    )
