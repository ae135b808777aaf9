"""`dpamoe convert` as people call it: one model, several, a batch file, a dry run, and Ctrl-C."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import checkpoint
from dpamoe import convert as conversion
from dpamoe.cli import options

FLAGS = ("--k-max", "2", "--budget", "2", "--group-size", "64")


@pytest.fixture(scope="module")
def text(tiny_dir, tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text((tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:8000], encoding="utf-8")
    return file


@pytest.fixture
def models(short_dir, tmp_path):
    """Two good copies of a model, and between them one whose file is cut short."""
    for name in ("first", "broken", "last"):
        shutil.copytree(short_dir, tmp_path / name)
    with (tmp_path / "broken" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    return tmp_path


@pytest.mark.slow
def test_several_models_one_of_them_broken(run, models, text):
    arguments = ("convert", models / "first", models / "broken", models / "last", "--output-dir", models / "out")
    arguments = (*arguments, "--calibration", text, *FLAGS)
    code, out, err = run(*arguments)
    assert code == 1
    assert "2 of 3 models converted" in out and "broken failed" in err
    assert "model.safetensors has 1000 bytes, its header alone takes" in out
    assert sorted(path.name for path in (models / "out").iterdir()) == ["first", "last"]
    assert dpamoe.report(dpamoe.load(models / "out" / "last")).experts == 32
    before = (models / "out" / "first" / checkpoint.INDEX).stat().st_mtime_ns
    shutil.copy(models / "first" / "model.safetensors", models / "broken")
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    outcome = json.loads(out)
    assert [model["failed"] for model in outcome["models"]] == [False] * 3 and outcome["failed"] == 0
    assert (models / "out" / "first" / checkpoint.INDEX).stat().st_mtime_ns == before  # it was complete already
    code, out, _ = run(*arguments[:-6], "--calibration", text, "--k-max", "3", "--budget", "2")
    assert code == 1 and out.count("exists: choose another name") == 3  # other settings are another result


def test_whatever_a_library_raises_the_others_go_on(run, models, text, monkeypatch):
    original = conversion.outline

    def outline(source, *rest):
        if source.folder.name == "first":
            raise RuntimeError("shape mismatch\nin a library")
        return original(source, *rest)

    monkeypatch.setattr(conversion, "outline", outline)
    code, out, err = run(
        "convert", models / "first", models / "last", "--output-dir", models / "out", "--calibration", text, *FLAGS
    )
    assert code == 1 and "first: shape mismatch in a library" in out.splitlines() and "1 of 2 models converted" in out
    assert (models / "out" / "last" / checkpoint.INDEX).is_file()


def test_a_batch_file(run, models, text):
    (models / "batch.txt").write_text("# the good ones\nfirst\n\nlast\n")
    code, out, err = run(
        "convert", "--batch", models / "batch.txt", "--output-dir", models / "out", "--calibration", text, *FLAGS
    )
    assert code == 0 and "2 of 2 models converted" in out, err
    (models / "batch.txt").write_text(f"first\n{models / 'out' / 'first'}\n")
    code, _, err = run("convert", "--batch", models / "batch.txt", "--output-dir", models / "out", *FLAGS)
    assert code == 1 and "two of the models are called first" in err
    code, _, err = run("convert", "--output-dir", models / "out")
    assert code == 1 and "no model was named" in err


@pytest.mark.slow
def test_a_dry_run_writes_nothing(run, tiny_dir, text, tmp_path):
    arguments = ("convert", tiny_dir, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)
    code, out, err = run(*arguments, "--dry-run", "--json")
    assert code == 0 and not list(tmp_path.iterdir()), err
    foreseen = json.loads(out)
    code, out, _ = run(*arguments, "--dry-run")
    assert f"64 experts in 4 sites; would write {foreseen['predicted_bytes']:,} bytes" in out
    code, out, _ = run("convert", "nowhere", *arguments[1:], "--dry-run")
    assert code == 1 and "1 of 2 models can be converted" in out
    code, out, _ = run(*arguments, "--json")
    assert json.loads(out)["bytes"] == pytest.approx(foreseen["predicted_bytes"], rel=0.01)


@pytest.mark.slow
def test_interrupted_it_goes_on(run, tiny_dir, text, tmp_path, monkeypatch):
    from dpamoe import stream

    arguments = ("convert", tiny_dir, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)
    encoded, original = [], stream.encode_site

    def interrupted(experts, site, *rest):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(site.path)
        return original(experts, site, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(stream, "encode_site", interrupted)
        code, out, err = run(*arguments)
    assert (code, out) == (130, "") and "interrupted" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.log", "out.partial"]
    code, _, err = run("inspect", tmp_path / "out.partial")
    assert code == 1
    code, out, err = run(*arguments)
    assert code == 0 and "going on: 2 parts are done" in err and "encode 1/2 model.layers.2" in err
    code, out, _ = run("verify", tmp_path / "out", tiny_dir)
    assert code == 0


def test_too_little_memory(run, tiny_dir, tmp_path):
    code, _, err = run("convert", tiny_dir, "--output-dir", tmp_path / "out", "--max-memory", "100MB")
    assert code == 1 and "--max-memory allows 0.1 GiB" in err
    code, _, err = run("convert", tiny_dir, "--output-dir", tmp_path / "out", "--max-memory", "much")
    assert code == 2 and "'much' is not a size such as 24GiB" in err


def test_experts_that_hold_nan(run, tiny_dir, text, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layers.2.mlp.experts" in name)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run("convert", folder, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)
    last = err.splitlines()[-1]
    assert code == 1 and "model.safetensors holds NaN or infinite weights in" in last and "layers.2.mlp.experts" in last
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "written, expected",
    [("24GiB", 24 << 30), ("1.5 GB", 1_500_000_000), ("700MiB", 700 << 20), ("5000", 5000), ("2k", 2000), ("1TiB", 1 << 40)],
)
def test_sizes(written, expected):
    assert options.size(written) == expected


def test_jobs_have_the_defaults_of_the_command():
    job = conversion.Job("a", "b")
    assert (job.spend.budget, job.spec, job.resume, job.device) == (4.0, dpamoe.EncodeSpec(), True, "cpu")


@pytest.mark.slow
def test_what_stays_as_it_is_is_said_and_counted(run, tiny_dir, text, tmp_path):
    arguments = ("convert", tiny_dir, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)
    code, out, _ = run(*arguments, "--ignore", "model.layers.0.*", "--ignore", "model.layers.2.*")
    size = 6_291_456 // 4  # a quarter of all expert weights
    assert code == 0 and "routed experts encoded: 32 of 64 in 2 sites" in out
    for layer in (0, 2):
        assert f"left as it is: model.layers.{layer}.mlp.experts ({size:,} bytes): ignored, as --ignore asks" in out
    assert out.endswith(f"experts left as they are: 2 of the modules that hold some, {2 * size:,} bytes\n")


def test_a_model_whose_experts_become_graphs(run, tmp_path):
    from .test_whole_models import language_model

    language_model("jetmoe").save_pretrained(tmp_path / "source")
    for more in ((), ("--dry-run",)):
        code, _, err = run("convert", tmp_path / "source", "--output-dir", tmp_path / "out", *more)
        assert code == 1 and "no routed experts that can be encoded were found" in err
        assert "model.layers.0.mlp: no module around its experts is called with" in err
        assert "dpamoe.transform may encode them in memory, as graphs, which no folder can hold yet" in err


def odd_place(name):
    """A folder that is no model of its own, by what is odd about it."""

    def make(folder, model):
        if name == "a file":
            (folder / "odd").write_text("")
        elif name == "two models in it":
            shutil.copytree(model, folder / "odd" / "one")
            shutil.copytree(model, folder / "odd" / "two")
        elif name == "nowhere":
            (folder / "odd").symlink_to(folder / "gone")
        else:
            shutil.copytree(model, folder / "odd")
        if name == "weights twice":
            shutil.copy(folder / "odd" / "model.safetensors", folder / "odd" / "consolidated.safetensors")
        if name == "other weights":
            (folder / "odd" / "model.safetensors").rename(folder / "odd" / "pytorch_model.bin")
        if name == "no tokenizer":
            for file in (folder / "odd").glob("tokenizer*"):
                file.unlink()
        return folder / "odd"

    return make


@pytest.mark.parametrize(
    "name, words",
    [
        ("a file", "odd is a file: give the folder of a model"),
        ("two models in it", "odd has no config.json: give a model folder, such as {folder}/odd/one, one of 2 inside of it"),
        ("nowhere", "model folder {folder}/odd does not exist"),
        ("weights twice", "is in consolidated.safetensors and in model.safetensors of {folder}/odd: remove one of them"),
        ("other weights", "odd has no safetensors files, only pytorch_model.bin: load it with transformers and save it again"),
        ("no tokenizer", "no tokenizer could be loaded from {folder}/odd: give token ids instead of text"),
    ],
)
def test_odd_sources(run, tiny_dir, text, tmp_path, name, words):
    source = odd_place(name)(tmp_path, tiny_dir)
    code, out, err = run("convert", source, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)
    assert (code, out) == (1, "") and words.format(folder=tmp_path) in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "place, words",
    [
        ("model", "model is the model itself, or inside of it"),
        ("link", "link is the model itself, or inside of it"),
        ("model/encoded", "encoded is the model itself, or inside of it"),
        ("none/encoded", "none, which should hold encoded, does not exist: make it first"),
        ("dangling", "dangling exists: choose another name"),
        ("file", "file exists: choose another name"),
        (".", "exists: choose another name"),
    ],
)
def test_odd_outputs(run, tiny_dir, text, tmp_path, monkeypatch, place, words):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_dir, "model")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("convert", "model", "--output-dir", place, "--calibration", text, *FLAGS)
    assert (code, out) == (1, "") and words in err.splitlines()[-1] and "delete" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["file", "none/results"])
def test_no_place_for_the_results_of_several(run, tiny_dir, tmp_path, place):
    (tmp_path / "file").write_text("kept")
    code, _, err = run("convert", tiny_dir, tmp_path / "other", "--output-dir", tmp_path / place)
    assert code == 1 and f"{place}, which should hold the results, cannot be made (" in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_relative_folders_and_links(run, tiny_dir, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tiny_dir)
    code, out, err = run("convert", "link/", "--output-dir", "out/", "--calibration", text, *FLAGS)
    assert code == 0 and f"wrote {tmp_path / 'out'}:" in out, err
    monkeypatch.chdir(tmp_path / "out")
    code, out, err = run("verify", ".", "../link")
    assert code == 0, err
    settings = checkpoint.read_config(tmp_path / "out")["quantization_config"]
    assert settings["source"] == "../link"
