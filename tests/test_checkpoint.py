"""The format on disk: what lies in which file, whole or not at all, and every kind of damage named before it is read."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import checkpoint, storage
from dpamoe.modules import encoded_experts
from dpamoe.spec import EncodeSpec

PLANE_3 = "model-plane-3-00001-of-00001.safetensors"
BASE = "model-base-00001-of-00001.safetensors"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def saved(transformed, tmp_path_factory):
    """Folder of a small random encoded model: gpt_oss, so that there are biases; read only."""
    return dpamoe.save(transformed("gpt_oss")[1], tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that may be damaged."""
    return shutil.copytree(saved, tmp_path / "model")


def index_of(folder):
    return json.loads((folder / checkpoint.INDEX).read_text())


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder, file, change, index=True):
    """Write a file anew with tensors changed by `change(dict)`; the index follows, as far as sizes go, if asked to."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if index:
        content = index_of(folder)
        content["files"][file] = (folder / file).stat().st_size
        (folder / checkpoint.INDEX).write_text(json.dumps(content))


def test_every_tensor_lies_in_the_file_of_its_group(saved):
    index = index_of(saved)
    expected = {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        expected |= {f"{path}.residuals": "model-residuals.safetensors", f"{path}.up_bias": BASE, f"{path}.down_bias": BASE}
        for name in ("gate_up_proj", "down_proj"):
            expected[f"{path}.{name}.offset"] = BASE
            for c in range(8):
                file = f"model-plane-{c}-00001-of-00001.safetensors"
                expected |= {f"{path}.{name}.plane.{c}": file, f"{path}.{name}.scale.{c}": file}
    assert {name: file for name, file in index["weight_map"].items() if ".experts." in name} == expected
    assert {file for name, file in index["weight_map"].items() if ".experts." not in name} == {BASE}
    found = {}
    for file in saved.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= dict.fromkeys(opened.keys(), file.name)
    assert found == index["weight_map"]
    assert index["files"] == {file.name: file.stat().st_size for file in saved.glob("*.safetensors")}
    assert index["metadata"] == {"format": "dpamoe", "version": 1}


def test_shapes_and_dtypes_are_those_of_the_design(saved):
    """gpt_oss: 8 experts, 64 -> 2 * 32 -> 64, groups of 32."""
    tensors = load_file(saved / PLANE_3) | load_file(saved / BASE) | load_file(saved / checkpoint.RESIDUALS)
    shapes = {
        "gate_up_proj.plane.3": (torch.uint8, (8, 64, 8)), "gate_up_proj.scale.3": (torch.float16, (8, 64, 2)),
        "gate_up_proj.offset": (torch.float16, (8, 64, 2)), "down_proj.plane.3": (torch.uint8, (8, 64, 4)),
        "down_proj.scale.3": (torch.float16, (8, 64, 1)), "down_proj.offset": (torch.float16, (8, 64, 1)),
        "residuals": (torch.float32, (8, 9)), "up_bias": (torch.float32, (8, 64)), "down_bias": (torch.float32, (8, 64)),
    }  # fmt: skip
    found = {name: (tensors[f"{EXPERTS}.{name}"].dtype, tuple(tensors[f"{EXPERTS}.{name}"].shape)) for name in shapes}
    assert found == shapes


def test_tied_scales_lie_with_the_base(random_model, random_ids, tmp_path):
    spec = EncodeSpec(group_size=32, scale_mode="tied", k_max=3)
    model = dpamoe.transform(random_model("qwen3_moe"), 3, calibration=random_ids(4, 50), spec=spec)
    weight_map = index_of(dpamoe.save(model, tmp_path / "tied"))["weight_map"]
    own = {name.removeprefix(EXPERTS + "."): file for name, file in weight_map.items() if name.startswith(EXPERTS)}
    base = {f"{name}.{part}": BASE for name in ("gate_up_proj", "down_proj") for part in ("scale", "offset", "unit")}
    planes = {
        f"{name}.plane.{c}": f"model-plane-{c}-00001-of-00001.safetensors"
        for name in ("gate_up_proj", "down_proj")
        for c in range(3)
    }
    assert own == base | planes | {"residuals": "model-residuals.safetensors"}


def test_everything_but_experts_is_stored_byte_for_byte(family, transformed, tmp_path):
    original, model = transformed(family)
    stored = load_file(dpamoe.save(model, tmp_path / "model") / BASE)
    paths = tuple(f"{path}." for path in encoded_experts(model))
    outside = {name: tensor for name, tensor in original.state_dict().items() if not name.startswith(paths)}
    assert {name for name in stored if not name.startswith(paths)} == set(outside)
    for name, tensor in outside.items():
        assert stored[name].dtype == tensor.dtype and stored[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_tied_weights_are_written_once(tiny_saved):
    assert "model.embed_tokens.weight" in index_of(tiny_saved)["weight_map"]
    assert "lm_head.weight" not in index_of(tiny_saved)["weight_map"]


def test_settings_in_the_config(saved):
    settings = json.loads((saved / "config.json").read_text())["quantization_config"]
    sites = settings.pop("sites")
    assert settings == {
        "quant_method": "dpamoe", "version": 1, "group_size": 32, "k_min": 2, "k_max": 8, "scale_mode": "shared",
        "beta": 2.0, "iterations": 8, "default_budget": 4.0, "budget_scope": "token", "skip": False,
        "allocator": "exact", "source": None, "unreached": {},
    }  # fmt: skip
    assert [site["path"] for site in sites] == ["model.layers.0.mlp.experts", EXPERTS]
    assert sites[0]["layout"] == {
        "ups": [{"names": ["gate_up_proj"], "transposed": True}], "down": {"names": ["down_proj"], "transposed": True},
        "up_biases": [{"names": ["gate_up_proj_bias"], "transposed": False}],
        "down_bias": {"names": ["down_proj_bias"], "transposed": False}, "order": "interleaved",
    }  # fmt: skip


def test_large_groups_are_split_into_shards(transformed, tmp_path, monkeypatch):
    _, model = transformed("qwen3_moe")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 10_000)
    out = dpamoe.save(model, tmp_path / "model")
    shards = sorted(file.name for file in out.glob("model-plane-5-*"))
    assert len(shards) > 1
    assert shards == [f"model-plane-5-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    # 10,000 bytes of tensors at most, or one tensor alone, and a header
    assert all(file.stat().st_size <= 10_000 + 2_000 or len(load_file(file)) == 1 for file in out.glob("model-plane-*"))
    again = dpamoe.load(out)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    (out / shards[-1]).unlink()
    with pytest.raises(ValueError, match=rf"{shards[-1]} is missing"):
        dpamoe.load(out)


def test_a_prefix_names_no_file_of_further_planes(saved):
    settings, needed = checkpoint.read_index(saved, 4)
    assert settings["k_max"] == 8
    assert {file for file in needed.values() if "plane" in file} == {
        f"model-plane-{c}-00001-of-00001.safetensors" for c in range(4)
    }
    assert set(checkpoint.read_index(saved)[1]) - set(needed) == {
        f"model.layers.{layer}.mlp.experts.{name}.{part}.{c}"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
        for part in ("plane", "scale")
        for c in range(4, 8)
    }


def damage_size(by):
    def damage(folder):
        content = (folder / PLANE_3).read_bytes()
        (folder / PLANE_3).write_bytes(content[:by] if by < 0 else content + bytes(by))

    return damage


def header_of(size):
    """A file whose size is that of the index and whose header describes another one."""

    def damage(folder):
        content = bytearray((folder / PLANE_3).read_bytes())
        content[:8] = (int.from_bytes(content[:8], "little") + size).to_bytes(8, "little")
        (folder / PLANE_3).write_bytes(content)

    return damage


def both_say(size):
    """As many bytes as a changed index says, but not as many as the header says."""

    def damage(folder):
        content = (folder / PLANE_3).read_bytes()
        (folder / PLANE_3).write_bytes(content[:size] if size < 0 else content + bytes(size))
        index = index_of(folder)
        index["files"][PLANE_3] += size
        (folder / checkpoint.INDEX).write_text(json.dumps(index))

    return damage


def rename(tensors):
    tensors[f"{EXPERTS}.down_proj.plame.3"] = tensors.pop(f"{EXPERTS}.down_proj.plane.3")


def rename_everywhere(folder):
    rewrite(folder, PLANE_3, rename)
    index = index_of(folder)
    index["weight_map"][f"{EXPERTS}.down_proj.plame.3"] = index["weight_map"].pop(f"{EXPERTS}.down_proj.plane.3")
    (folder / checkpoint.INDEX).write_text(json.dumps(index))


def drop_everywhere(name):
    def damage(folder):
        file = index_of(folder)["weight_map"][name]
        rewrite(folder, file, lambda tensors: tensors.pop(name))
        index = index_of(folder)
        del index["weight_map"][name]
        (folder / checkpoint.INDEX).write_text(json.dumps(index))

    return damage


def add_everywhere(folder):
    rewrite(folder, BASE, lambda tensors: tensors.update({"model.layers.7.norm.weight": torch.zeros(3)}))
    index = index_of(folder)
    index["weight_map"]["model.layers.7.norm.weight"] = BASE
    (folder / checkpoint.INDEX).write_text(json.dumps(index))


def reshape(tensors):
    name = f"{EXPERTS}.down_proj.plane.3"
    tensors[name] = tensors[name][:, :, :3].contiguous()


def retype(tensors):
    name = f"{EXPERTS}.down_proj.scale.3"
    tensors[name] = tensors[name].to(torch.bfloat16)


def cut(name, size):
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:size])


DAMAGES = {
    "one byte short": (damage_size(-1), ["plane-3", "bytes", "truncated"]),
    "a quarter left": (lambda f: (f / PLANE_3).write_bytes((f / PLANE_3).read_bytes()[:2000]), ["plane-3", "2000 bytes"]),
    "empty": (lambda f: (f / PLANE_3).write_bytes(b""), ["plane-3", "has 0 bytes"]),
    "one byte long": (damage_size(1), ["plane-3", "truncated or changed"]),
    "short, and the index too": (both_say(-1), ["plane-3", "its header describes", "truncated or padded"]),
    "long, and the index too": (both_say(7), ["plane-3", "its header describes"]),
    "header too long": (header_of(1 << 40), ["plane-3", "header"]),
    "header too short": (header_of(-9), ["plane-3", "header"]),
    "file missing": (lambda f: (f / PLANE_3).unlink(), ["plane-3", "is missing", "incomplete"]),
    "residuals missing": (lambda f: (f / checkpoint.RESIDUALS).unlink(), ["dpamoe profile"]),
    "index missing": (lambda f: (f / checkpoint.INDEX).unlink(), [checkpoint.INDEX, "incomplete"]),
    "index cut": (cut(checkpoint.INDEX, 400), [checkpoint.INDEX, "not valid JSON"]),
    "index no object": (lambda f: (f / checkpoint.INDEX).write_text("[]"), [checkpoint.INDEX, "no JSON object"]),
    "index without files": (lambda f: (f / checkpoint.INDEX).write_text("{}"), [checkpoint.INDEX, "lacks weight_map"]),
    "config missing": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "config cut": (cut("config.json", 400), ["config.json is not valid JSON"]),
    "tensor misspelled": (lambda f: rewrite(f, PLANE_3, rename), [PLANE_3, f"lacks tensor {EXPERTS}.down_proj.plane.3"]),
    "tensor misspelled everywhere": (rename_everywhere, ["lacks 1 tensors", f"{EXPERTS}.down_proj.plane.3"]),
    "tensor gone": (drop_everywhere(f"{EXPERTS}.gate_up_proj.scale.3"), ["lacks 1 tensors", f"{EXPERTS}.gate_up_proj.scale.3"]),
    "offset gone": (drop_everywhere(f"{EXPERTS}.down_proj.offset"), ["lacks 1 tensors", f"{EXPERTS}.down_proj.offset"]),
    "bias gone": (drop_everywhere(f"{EXPERTS}.up_bias"), [f"{EXPERTS}.up_bias is missing"]),
    "table gone": (drop_everywhere(f"{EXPERTS}.residuals"), ["lacks 1 tensors", f"{EXPERTS}.residuals"]),
    "router gone": (drop_everywhere("model.layers.1.mlp.router.weight"), ["lacks 1 tensors", "layers.1.mlp.router.weight"]),
    "tensor unknown": (add_everywhere, ["model.layers.7.norm.weight", "does not know"]),
    "wrong shape": (lambda f: rewrite(f, PLANE_3, reshape), [f"{EXPERTS}.down_proj.plane.3", "[8, 64, 3]", "[8, 64, 4]"]),
    "wrong dtype": (lambda f: rewrite(f, PLANE_3, retype), [f"{EXPERTS}.down_proj.scale.3", "bfloat16", "float16"]),
    "later version": (lambda f: change_config(f, lambda c: c.update(version=2)), ["format version 2", "reads version 1"]),
    "no version": (lambda f: change_config(f, lambda c: c.pop("version")), ["format version None"]),
    "no sites": (lambda f: change_config(f, lambda c: c.pop("sites")), ["config.json lacks sites"]),
    "no group size": (lambda f: change_config(f, lambda c: c.pop("group_size")), ["config.json lacks group_size"]),
    "another format": (lambda f: change_config(f, lambda c: c.update(quant_method="gptq")), ["not a dpamoe checkpoint"]),
}  # fmt: skip


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(folder, damage, words):
    damage(folder)
    with pytest.raises(ValueError) as caught:
        dpamoe.load(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name", ["one byte short", "one byte long", "file missing", "header too long", "config cut", "index cut"]
)
def test_damage_is_found_before_any_tensor_is_read(folder, monkeypatch, name):
    monkeypatch.setattr(checkpoint, "safe_open", lambda *args: pytest.fail("read"))
    DAMAGES[name][0](folder)
    with pytest.raises(ValueError):
        dpamoe.load(folder)


def test_sizes_in_the_message_are_those_expected_and_found(folder):
    size = (folder / PLANE_3).stat().st_size
    damage_size(-1)(folder)
    with pytest.raises(ValueError, match=rf"{PLANE_3} has {size - 1} bytes, {size} were written"):
        checkpoint.read_index(folder)


@pytest.mark.parametrize("k_max", [1, 0, 9, -1])
def test_k_max_beyond_what_the_file_holds(saved, k_max):
    with pytest.raises(ValueError, match=rf"k_max {k_max} asked of a checkpoint with planes 2 to 8"):
        dpamoe.load(saved, k_max=k_max)


@pytest.mark.parametrize("content, encoded", [({"quantization_config": {"quant_method": "dpamoe"}}, True), ({}, False)])
def test_which_folders_are_encoded(tmp_path, content, encoded):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert checkpoint.is_encoded(tmp_path) == encoded
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert not checkpoint.is_encoded(tmp_path)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        checkpoint.is_encoded(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        checkpoint.is_encoded(tmp_path)


def test_header_of_a_whole_file(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    checkpoint.check_header(tmp_path / "a.safetensors")
    save_file({}, tmp_path / "none.safetensors")
    checkpoint.check_header(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("this is no tensor file at all")
    with pytest.raises(ValueError, match="text.safetensors has no readable safetensors header"):
        checkpoint.check_header(tmp_path / "text.safetensors")


def test_output_appears_whole_or_not_at_all(transformed, tmp_path):
    _, model = transformed("qwen3_moe")
    out = tmp_path / "model"

    def fail(folder):
        assert folder == tmp_path / "model.partial" and (folder / PLANE_3).is_file() and not out.exists()
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk is full"):
        checkpoint.write(model, out, {"quantization_config": {}}, fail)
    assert not out.exists()
    (tmp_path / "model.partial" / "leftover.txt").write_text("from the broken run")
    checkpoint.write(model, out, {"quantization_config": {}}, lambda folder: None)
    assert not (tmp_path / "model.partial").exists() and not (out / "leftover.txt").exists()
    assert json.loads((out / "config.json").read_text()) == {"quantization_config": {}}


def test_an_output_that_exists_is_left_alone(transformed, tmp_path):
    _, model = transformed("qwen3_moe")
    for name, make in (("folder", lambda path: path.mkdir()), ("file", lambda path: path.write_text("mine"))):
        make(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} exists: choose another name"):
            checkpoint.write(model, tmp_path / name, {}, lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "folder").iterdir())
    with pytest.raises(ValueError, match="nowhere, which should hold model, does not exist"):
        checkpoint.check_new(tmp_path / "nowhere" / "model")


def test_new_residuals_replace_the_old_in_one_step(folder):
    others = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != checkpoint.RESIDUALS}
    tables = {name: tensor * 2 for name, tensor in load_file(folder / checkpoint.RESIDUALS).items()}
    storage.write_residuals(folder, tables, {EXPERTS: [3]})
    written = load_file(folder / checkpoint.RESIDUALS)
    assert written.keys() == tables.keys() and all(torch.equal(tensor, tables[name]) for name, tensor in written.items())
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["unreached"] == {EXPERTS: [3]}
    others.pop("config.json")
    assert {file.name for file in folder.iterdir()} == {*others, "config.json", checkpoint.RESIDUALS}
    assert all((folder / name).read_bytes() == content for name, content in others.items())
    assert encoded_experts(dpamoe.load(folder))[EXPERTS].unreached == [3]


def test_residuals_of_another_shape_are_refused(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    tables = {name: tensor[:, :5].contiguous() for name, tensor in load_file(folder / checkpoint.RESIDUALS).items()}
    with pytest.raises(ValueError, match="do not have the shape"):
        storage.write_residuals(folder, tables, {})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
