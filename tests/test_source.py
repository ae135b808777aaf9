"""Model folders as tensors on disk: every value as it is stored, and a sentence for what does not agree."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from dpamoe.source import open_source, read_entry

KINDS = {
    "a": torch.randn(3, 5), "b": torch.randn(2, 2).half(), "c": torch.randn(4).bfloat16(), "d": torch.arange(3),
    "e": torch.tensor([True, False]), "f": torch.empty(0, 3), "g": torch.tensor(2.5), "h": torch.arange(3, dtype=torch.int8),
}  # fmt: skip


def make(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_kind_of_tensor(tmp_path):
    source = open_source(make(tmp_path / "m", KINDS))
    assert source.tensors.keys() == KINDS.keys()
    for name, tensor in KINDS.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
        assert source.tensors[name].shape == tuple(tensor.shape) and source.tensors[name].dtype == tensor.dtype
    assert torch.equal(source.read("a", torch.bfloat16), KINDS["a"].bfloat16())
    assert source.bytes == sum(t.numel() * t.element_size() for t in KINDS.values())


@pytest.mark.parametrize(
    "config, expected",
    [({"dtype": "bfloat16"}, torch.bfloat16), ({"torch_dtype": "float16"}, torch.float16), ({}, torch.float32)],
)
def test_the_type_a_model_computes_in(tmp_path, config, expected):
    assert open_source(make(tmp_path / "m", KINDS, config)).dtype() == expected


def test_quantised_weights_stand_under_the_plain_name(tmp_path):
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    tensors = {
        "x.weight": weight, "x.weight_scale_inv": torch.tensor([[2.0]]), "x.activation_scale": torch.ones(1),
        "y.experts_blocks": torch.full((2, 3, 1, 16), 0x22, dtype=torch.uint8),
        "y.experts_scales": torch.full((2, 3, 1), 127, dtype=torch.uint8), "z": torch.ones(2).bfloat16(),
    }  # fmt: skip
    source = open_source(make(tmp_path / "m", tensors, {"quantization_config": {"quant_method": "fp8"}}))
    assert {name: stored.shape for name, stored in source.tensors.items()} == {
        "x.weight": (4, 6), "y.experts": (2, 32, 3), "z": (2,),
    }  # fmt: skip
    assert source.tensors["x.weight"].dtype is None and source.dtype() == torch.bfloat16
    assert torch.equal(source.read("x.weight"), torch.full((4, 6), 2.0).bfloat16())
    assert torch.equal(source.read("y.experts", torch.float32), torch.ones(2, 32, 3))


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    source = open_source(make(tmp_path / "m", {"a": torch.ones(100)}))
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match="ended while it was read"):
        read_entry(source.tensors["a"].entries[0])


def test_other_weights_beside_an_index_are_not_read(tmp_path):
    folder = make(tmp_path / "m", {"a": torch.ones(2)})
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert open_source(folder).tensors["a"].entries[0].file.name == "model.safetensors"
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="a is in consolidated.safetensors and in model.safetensors"):
        open_source(folder)


def test_a_header_that_lies(tmp_path):
    folder = make(tmp_path / "m", {"a": torch.ones(2, 2)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[2,2]", b"[2,3]"))
    with pytest.raises(ValueError, match=r"gives a 16 bytes for F32 \[2, 3\]"):
        open_source(folder)
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F99"'))
    with pytest.raises(ValueError, match="holds a as F99, which is not supported"):
        open_source(folder)


def test_an_encoded_folder_is_no_source(tiny_saved):
    with pytest.raises(ValueError, match="is encoded already: give the original model"):
        open_source(tiny_saved)
