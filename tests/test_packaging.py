"""The package as others meet it: beside Hugging Face's `kernels`, without Triton, light to import, whole in a wheel."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = """import accelerate, numpy, safetensors.torch, torch, torch._inductor.compile_fx, tqdm, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
"""


def run_python(code, folder, extra_path=None):
    """Run `code` in a new interpreter started in `folder` (first on sys.path); return what it prints, read as JSON."""
    before = f"import sys; sys.path.insert(1, {str(extra_path)!r})\n" if extra_path else "import sys\n"
    done = subprocess.run([sys.executable, "-c", before + code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_bare_kernels_steps_aside_for_what_is_or_is_not_installed():
    code = """
import json, dpamoe.kernels, kernels
from transformers import Qwen3MoeForCausalLM
print(json.dumps([dpamoe.kernels.__file__, getattr(sys.modules["kernels"], "__file__", None)]))
"""
    ours, bare = run_python(code, ROOT)
    assert Path(ours) == ROOT / "kernels" / "__init__.py"
    assert bare != ours


@pytest.mark.slow
def test_bare_kernels_hands_over_to_another_package_of_that_name(tmp_path):
    (tmp_path / "kernels-0.0.dist-info").mkdir()  # else transformers reads the version of Hugging Face's where installed
    (tmp_path / "kernels-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.0\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.0'\nfrom kernels.inner import WORD\n")
    (tmp_path / "kernels" / "inner.py").write_text("WORD = 'theirs'\n")
    code = """
import json, dpamoe.kernels, kernels, kernels.inner
from transformers import Qwen3MoeForCausalLM
print(json.dumps([kernels.WORD, kernels.__file__, dpamoe.kernels.__file__]))
"""
    word, theirs, ours = run_python(code, ROOT, tmp_path)
    assert word == "theirs"
    assert Path(theirs) == tmp_path / "kernels" / "__init__.py"
    assert Path(ours) == ROOT / "kernels" / "__init__.py"


def test_imports_without_triton_and_without_the_heavy_extras(tmp_path):
    code = """
import json
sys.modules["triton"] = None
import dpamoe, dpamoe.kernels, dpamoe.passes
print(json.dumps([name for name in ("lm_eval", "matplotlib", "gguf") if name in sys.modules]))
"""
    assert run_python(code, tmp_path) == []


@pytest.mark.slow
def test_import_brings_in_only_what_the_package_needs(tmp_path):
    """What it finds there already comes first, in the same process."""
    code = f"""
{NEEDED}
import json
needed = set(sys.modules)
import dpamoe
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - needed}})))
"""
    ours = set(run_python(code, tmp_path))
    assert "dpamoe" in ours
    assert ours - {"dpamoe", "triton"} - sys.stdlib_module_names == set()


@pytest.mark.slow
def test_wheel_is_whole(tmp_path):
    source, wheels, unpacked = (tmp_path / name for name in ("source", "wheels", "unpacked"))
    for folder in ("dpamoe", "kernels", "passes"):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = wheels.glob("dpamoe-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(unpacked)
    assert held == expected_in_wheel()

    code = """
import json, dpamoe.kernels, dpamoe.passes
print(json.dumps([dpamoe.kernels.__file__, dpamoe.passes.__file__]))
"""
    found = [Path(file) for file in run_python(code, tmp_path, unpacked)]
    assert found == [unpacked / "dpamoe" / name / "__init__.py" for name in ("kernels", "passes")]


def expected_in_wheel():
    """Names of all product code and all asset files, as a wheel should hold them."""
    code = [path for folder in ("dpamoe", "kernels", "passes") for path in (ROOT / folder).rglob("*.py")]
    assets = [path for path in (ROOT / "dpamoe" / "assets").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    names = {path.relative_to(ROOT).as_posix() for path in code + assets}
    assert "dpamoe/assets/tiny/model.safetensors" in names
    return {name if name.startswith("dpamoe/") else f"dpamoe/{name}" for name in names}
