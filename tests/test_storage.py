"""Saving, loading, refreshing: what comes back is what was saved, and nothing else gets in or out."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import dpamoe
from dpamoe import checkpoint, compare, sensitivity, storage
from dpamoe.modules import encoded_experts

ROOT = Path(__file__).resolve().parents[1]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """What layers matter is measured on little text, which takes less time."""
    monkeypatch.setattr(sensitivity, "TOKENS", 1000)


@pytest.fixture
def tiny_copy(tiny_dir, tmp_path):
    """A copy of the shipped model's folder that may be damaged."""
    return shutil.copytree(tiny_dir, tmp_path / "source")


@pytest.fixture
def saved_copy(tiny_saved, tmp_path):
    """A copy of the encoded shipped model that may be damaged."""
    return shutil.copytree(tiny_saved, tmp_path / "encoded")


SPEC = dpamoe.EncodeSpec(group_size=32)


@pytest.fixture
def plain(random_model):
    """Function that gives a random model with weights in bf16."""

    def make():
        model = random_model("qwen3_moe")
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model

    return make


@pytest.fixture
def saved(plain, random_ids, tmp_path):
    """Folder of the random model, encoded with `random_ids(16, 125)`; it may be damaged."""
    return dpamoe.save(dpamoe.transform(plain(), calibration=random_ids(16, 125), spec=SPEC), tmp_path / "saved")


def test_what_is_loaded_is_what_was_saved(family, transformed, random_ids, tmp_path):
    _, model = transformed(family)
    dpamoe.set_budget(model, 3.5)
    before = logits(model, random_ids(2, 24))
    assert dpamoe.save(model, tmp_path / "model") == tmp_path / "model"
    again = dpamoe.load(tmp_path / "model")
    assert type(again) is type(model) and not again.training
    assert torch.equal(logits(again, random_ids(2, 24)), before)
    state = again.state_dict()
    assert list(state) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor)
    assert dpamoe.report(again) == dpamoe.report(model)
    assert not any(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("spec", [{"scale_mode": "tied"}, {"k_min": 1, "k_max": 5}, {"group_size": -1}, {"group_size": 24}])
def test_every_way_to_encode_survives(random_model, random_ids, tmp_path, spec):
    spec = dpamoe.EncodeSpec(**{"group_size": 32, "iterations": 1, **spec})
    model = dpamoe.transform(random_model("gpt_oss"), 3.5, calibration=random_ids(4, 50), spec=spec)
    before = logits(model, random_ids(2, 24))
    again = dpamoe.load(dpamoe.save(model, tmp_path / "model"))
    assert next(iter(encoded_experts(again).values())).spec == spec
    assert torch.equal(logits(again, random_ids(2, 24)), before)


def test_the_shipped_model_comes_back_in_bf16_with_its_head_tied(tiny_encoded, tiny_saved):
    model, again = tiny_encoded(), dpamoe.load(tiny_saved)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert again.lm_head.weight is again.model.embed_tokens.weight
    ids = torch.randint(3, 2048, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_an_untied_head_stays_its_own(transformed, tmp_path):
    _, model = transformed("qwen3_moe")
    again = dpamoe.load(dpamoe.save(model, tmp_path / "model"))
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_of_random_models(random_model, random_ids, tmp_path, tied):
    model = random_model("qwen3_moe", {"tie_word_embeddings": tied})
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=32))
    before = logits(model, random_ids(2, 24))
    again = dpamoe.load(dpamoe.save(model, tmp_path / "model"))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(logits(again, random_ids(2, 24)), before)


def test_how_experts_ran_before_makes_no_difference(random_model, random_ids, tmp_path):
    model = random_model("qwen3_moe")
    model.set_experts_implementation("eager")
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=32))
    before = logits(model, random_ids(2, 24))
    assert torch.equal(logits(dpamoe.load(dpamoe.save(model, tmp_path / "model")), random_ids(2, 24)), before)


def test_saving_again_writes_the_same_bytes(tiny_saved, tmp_path):
    """Into a folder of the same name at the same depth, so that relative paths are equal."""
    out = tiny_saved.parent.with_name("again") / tiny_saved.name
    out.parent.mkdir()
    dpamoe.save(dpamoe.load(tiny_saved), out)
    assert contents(out) == contents(tiny_saved)


def test_saving_again_a_model_of_no_folder(transformed, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = dpamoe.save(transformed("gpt_oss")[1], tmp_path / "a" / "model")
    second = dpamoe.save(dpamoe.load(first), tmp_path / "b" / "model")
    assert contents(second) == contents(first)


def test_the_original_is_still_known_after_saving_again(tiny_saved, tiny_dir, tmp_path):
    assert storage.reference_of(tiny_saved, None) == tiny_dir
    again = dpamoe.save(dpamoe.load(tiny_saved), tmp_path / "again")
    assert storage.reference_of(again, None) == tiny_dir


def test_skipping_is_saved_and_loaded(tiny_encoded, tmp_path):
    model = tiny_encoded()
    dpamoe.set_spend(model, budget=1.5, skip=True)
    folder = dpamoe.save(model, tmp_path / "model")
    spends = [{experts.spend for experts in encoded_experts(m).values()} for m in (dpamoe.load(folder), dpamoe.load(folder, 3))]
    assert spends == [{dpamoe.SpendSpec(1.5, skip=True)}, {dpamoe.SpendSpec(3.0, skip=True)}]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {experts.spend for experts in encoded_experts(loaded).values()} == spends[0]


def test_thresholds_are_saved_and_loaded(plain, random_ids, tmp_path):
    model = dpamoe.transform(plain(), 2.5, calibration=random_ids(16, 125), spec=SPEC, allocator="threshold", skip=True)
    folder = dpamoe.save(model, tmp_path / "model")
    ids = random_ids(2, 40)
    expected = logits(model, ids)
    for loaded in (dpamoe.load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)):
        assert {experts.spend for experts in encoded_experts(loaded).values()} == {
            dpamoe.SpendSpec(2.5, allocator="threshold", skip=True)
        }
        for path, experts in encoded_experts(model).items():
            found = encoded_experts(loaded)[path]
            for name in (*checkpoint.IMPORTANCE, "thresholds"):
                assert torch.equal(getattr(found, name), getattr(experts, name))
        assert torch.equal(logits(loaded, ids), expected)
    short = dpamoe.load(folder, k_max=3)
    levels = [next(iter(encoded_experts(m).values())).level for m in (model, short)]
    assert levels[1] < levels[0]  # with fewer planes for some, there are more for others


def test_profile_measures_what_thresholds_need(saved, plain, random_ids):
    with pytest.raises(ValueError, match="was not measured.*dpamoe profile"):
        dpamoe.set_spend(dpamoe.load(saved), allocator="threshold")
    storage.refresh_residuals(saved, plain(), random_ids(16, 125))
    model = dpamoe.load(saved, 3.0)
    dpamoe.set_spend(model, allocator="threshold")
    assert compare.check_hashes(saved) > 0
    direct = dpamoe.transform(plain(), 3.0, calibration=random_ids(16, 125), spec=SPEC, allocator="threshold")
    for path, experts in encoded_experts(direct).items():
        assert torch.equal(encoded_experts(model)[path].thresholds, experts.thresholds)


@pytest.mark.parametrize("damage", ["unlink", "garbage"])
def test_planes_beyond_k_max_are_not_opened(saved_copy, tiny_saved, damage):
    for c in range(4, 8):
        file = saved_copy / f"model-plane-{c}-00001-of-00001.safetensors"
        file.unlink() if damage == "unlink" else file.write_bytes(b"no tensors here")
    model = dpamoe.load(saved_copy, 3.5, k_max=4)
    whole = dpamoe.load(tiny_saved, 3.5)
    for path, experts in encoded_experts(whole).items():
        experts.k_max.fill_(4)
        short = encoded_experts(model)[path]
        assert [len(part.weight.planes) for part in (short.gate_up_proj, short.down_proj)] == [4, 4]
        assert int(short.k_max) == 4 and torch.equal(short.residuals, experts.residuals)  # the table is kept whole
    ids = torch.randint(3, 2048, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(model, ids), logits(whole, ids))
    assert max(dpamoe.stats(model)["histogram"]) == 4
    with pytest.raises(ValueError, match="plane-4"):
        dpamoe.load(saved_copy, k_max=5)


@pytest.mark.parametrize("k_max", [2, 5])
def test_a_default_budget_beyond_the_planes_is_clamped_with_a_warning(saved_copy, k_max):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = dpamoe.load(saved_copy, k_max=k_max)
    assert dpamoe.report(model).budget == min(4, k_max)
    assert [str(w.message) for w in caught if "budget" in str(w.message)] == (
        ["budget 4 exceeds the 2 planes held: using 2"] if k_max == 2 else []
    )


@pytest.mark.parametrize("arguments", [{"budget": 1}, {"budget": 8.5}, {"budget": 5, "k_max": 4}])
def test_a_budget_that_the_planes_do_not_allow_is_refused(tiny_saved, arguments):
    with pytest.raises(ValueError, match=rf"budget is {arguments['budget']}.*2 to {arguments.get('k_max', 8)}"):
        dpamoe.load(tiny_saved, **arguments)


@pytest.fixture(scope="module")
def travelled(tiny_dir, tmp_path_factory):
    """The shipped model with files beside it, that folder, and where it is saved encoded; read only."""
    place = tmp_path_factory.mktemp("travelled")
    source = shutil.copytree(tiny_dir, place / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling_own.py").write_text("# remote code")
    (source / "pytorch_model.bin").write_bytes(b"weights of another kind")
    (source / ".hidden").write_text("not ours")
    model = storage.load_original(source)
    dpamoe.transform(model, calibration=torch.arange(3, 1000), spec=dpamoe.EncodeSpec(iterations=0))
    return model, source, dpamoe.save(model, place / "out")


def test_what_travels_with_the_weights(travelled):
    model, tiny_copy, out = travelled
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modeling_own.py"):
        assert (out / name).read_bytes() == (tiny_copy / name).read_bytes()
    assert {file.name for file in out.iterdir() if file.suffix != ".safetensors"} == {
        "README.md", "config.json", "generation_config.json", checkpoint.INDEX, "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "modeling_own.py",
    }  # fmt: skip
    again = dpamoe.load(out)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id == 2


def test_no_file_names_a_path_of_this_machine(travelled):
    _, _, out = travelled
    for file in out.iterdir():
        content = file.read_bytes()
        assert str(out.parent).encode() not in content and str(ROOT).encode() not in content
        assert file.name.startswith("tokenizer") or file.suffix == ".safetensors" or b'"/' not in content
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["source"] == "../source"


def test_the_card_starts_with_the_import(tiny_saved):
    lines = (tiny_saved / "README.md").read_text().splitlines()
    code = lines[lines.index("```python") + 1 : lines.index("```", lines.index("```python") + 1)]
    assert code[0] == "import dpamoe"
    compile("\n".join(code), "card", "exec")
    assert "budget=4" in code[1]


@pytest.mark.slow
def test_transformers_alone_finds_no_weights(tiny_saved):
    """A process that never imports dpamoe must fail, not make up experts."""
    code = """
import sys
from transformers import AutoModelForCausalLM
assert "dpamoe" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except Exception as error:
    print("refused:", type(error).__name__)
else:
    print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tiny_saved)], capture_output=True, text=True, cwd=tiny_saved)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:")


def test_what_cannot_be_saved(random_model, transformed, tiny_saved, tmp_path):
    _, encoded = transformed("qwen3_moe")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM holds no encoded experts: call dpamoe.transform"):
        dpamoe.save(random_model("qwen3_moe"), tmp_path / "out")
    plain = nn.Sequential(encoded.model.layers[0].mlp.experts)
    with pytest.raises(ValueError, match="Sequential has no Hugging Face config"):
        dpamoe.save(plain, tmp_path / "out")
    with pytest.raises(ValueError, match="loaded with fewer than 8 planes"):
        dpamoe.save(dpamoe.load(tiny_saved, 3, k_max=4), tmp_path / "out")
    with pytest.raises(ValueError, match="nowhere, which should hold out, does not exist"):
        dpamoe.save(encoded, tmp_path / "nowhere" / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists"):
        dpamoe.save(encoded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and list((tmp_path / "out").iterdir()) == []


def test_relative_output_folders(transformed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dpamoe.save(transformed("qwen3_moe")[1], "model")
    assert dpamoe.report(dpamoe.load("model")).experts == 16


def test_an_architecture_that_transformers_lacks(saved_copy):
    config = json.loads((saved_copy / "config.json").read_text())
    for names in (["NoSuchModel"], None):
        (saved_copy / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(ValueError, match=rf"names architecture {names[0] if names else None}"):
            dpamoe.load(saved_copy)


def test_refreshing_changes_what_was_measured_alone(saved, plain, random_ids, residual_tolerance):
    before, others = contents(saved), random_ids(16, 125, seed=1)
    assert storage.refresh_residuals(saved, plain(), others) == {}
    after = contents(saved)
    assert {str(name) for name in before if after[name] != before[name]} == {checkpoint.RESIDUALS, checkpoint.INDEX}
    assert storage.refresh_residuals(saved, plain(), others) == {} and contents(saved) == after
    fresh = dpamoe.transform(plain(), calibration=others, spec=SPEC)
    for path, experts in encoded_experts(dpamoe.load(saved)).items():
        expected = encoded_experts(fresh)[path].residuals
        torch.testing.assert_close(experts.residuals / expected, torch.ones(8, 9), **residual_tolerance)


def test_a_lost_table_is_made_again(saved, plain, random_ids, tmp_path):
    whole = shutil.copytree(saved, tmp_path / "whole")
    (saved / checkpoint.RESIDUALS).unlink()
    storage.refresh_residuals(saved, plain(), random_ids(16, 125))
    there, here = contents(whole), contents(saved)
    measured = {Path(checkpoint.RESIDUALS), Path(checkpoint.INDEX)}
    assert {name: there[name] for name in there.keys() - measured} == {name: here[name] for name in here.keys() - measured}
    before, after = (load_file(folder / checkpoint.RESIDUALS) for folder in (whole, saved))
    assert all(torch.equal(after[name], table) for name, table in before.items())


def test_refreshing_on_another_model_is_refused(saved_copy, random_model, random_ids):
    before = contents(saved_copy)
    for family in ("qwen3_moe", "llama"):
        with pytest.raises(ValueError, match=r"no experts like model\.layers\.0\.mlp\.experts of .*encoded"):
            storage.refresh_residuals(saved_copy, random_model(family), random_ids(4, 50))
    assert contents(saved_copy) == before


def test_where_the_original_is(saved_copy, tiny_saved, tiny_dir):
    assert storage.reference_of(tiny_saved, None) == tiny_dir
    assert storage.reference_of(tiny_saved, "elsewhere") == Path("elsewhere")
    with pytest.raises(ValueError, match="was not found: give it with --reference"):  # the copy lies elsewhere
        storage.reference_of(shutil.copytree(saved_copy, saved_copy.parent / "deep" / "er"), None)


def test_an_original_that_was_not_recorded(transformed, tmp_path):
    out = dpamoe.save(transformed("qwen3_moe")[1], tmp_path / "model")
    with pytest.raises(ValueError, match=r"\(not recorded\) was not found: give it with --reference"):
        storage.reference_of(out, None)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def rename_layers(folder):
    rewrite(folder, lambda t: {name.replace("model.layers", "model.language_model.layers"): v for name, v in t.items()})


def drop(part):
    return lambda folder: rewrite(folder, lambda t: {name: tensor for name, tensor in t.items() if part not in name})


def truncate(by):
    def damage(folder):
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size - by)

    return damage


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncate(1), "model.safetensors has 7254399 bytes, its header describes 7254400"),
        (truncate(1 << 20), "model.safetensors has 6205824 bytes, its header describes 7254400"),
        (lambda folder: (folder / "model.safetensors").unlink(), "could not be loaded"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "could not be loaded"),
        (rename_layers, "lacks 44 tensors of the model, such as model.layers.0"),
        (drop("layers.2.mlp.experts"), "lacks 2 tensors of the model, such as model.layers.2.mlp.experts.down_proj"),
        (drop("layers.1.mlp.experts.5.up_proj"), "could not be loaded"),
        (drop("layers.3.mlp.gate.weight"), "lacks 1 tensors of the model, such as model.layers.3.mlp.gate.weight"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_a_damaged_original_is_refused(tiny_copy, damage, words):
    damage(tiny_copy)
    with pytest.raises(ValueError) as caught:
        storage.load_original(tiny_copy)
    assert words in str(caught.value) and str(tiny_copy) in str(caught.value)


def test_an_original_loads_as_it_is_stored(tiny_dir):
    model = storage.load_original(tiny_dir)
    stored = load_file(tiny_dir / "model.safetensors")
    assert not model.training and model.dtype == torch.bfloat16
    assert torch.equal(model.model.layers[2].mlp.gate.weight, stored["model.layers.2.mlp.gate.weight"])
    gate, up = model.model.layers[2].mlp.experts.gate_up_proj[7].chunk(2)
    assert torch.equal(gate, stored["model.layers.2.mlp.experts.7.gate_proj.weight"])
    assert torch.equal(up, stored["model.layers.2.mlp.experts.7.up_proj.weight"])
