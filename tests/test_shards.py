"""Growing safetensors files: any reader reads them, crashes cut nothing but what was not finished, bytes never vary."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dpamoe import checkpoint
from dpamoe.shards import Shards, header_room

FIRST = {"a.plane": torch.arange(6, dtype=torch.uint8).view(2, 3), "a.scale": torch.tensor([1.5, 2.5]).half()}
SECOND = {"b.plane": torch.arange(8, dtype=torch.uint8), "b.scale": torch.ones(3, 2).half(), "b.none": torch.empty(0, 4)}
ROOMS = {"plane-0": header_room([*FIRST, *SECOND])}


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def unbroken(tmp_path):
    folder = tmp_path / "unbroken"
    folder.mkdir()
    shards = Shards(folder, ROOMS)
    for part in (FIRST, SECOND):
        shards.append("plane-0", part)
        shards.sync()
    return folder, shards, shards.place(["plane-0"])


def test_what_is_read_is_what_was_appended(unbroken):
    folder, shards, (weight_map, sizes, hashes) = unbroken
    loaded = {name: tensor for file in sizes for name, tensor in load_file(folder / file).items()}
    expected = FIRST | SECOND
    assert loaded.keys() == expected.keys() == weight_map.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
        assert hashes[name] == checkpoint.sha256(tensor)
    for file, size in sizes.items():
        assert (folder / file).stat().st_size == size
        assert checkpoint.read_header(folder / file)[0] == ROOMS["plane-0"]


def test_odd_ends_close_a_file(unbroken):
    """6 bytes of planes behind 4 of scales leave 10, where floats may not begin."""
    _, shards, (weight_map, _, _) = unbroken
    assert [list(shard["tensors"]) for shard in shards.state["plane-0"]] == [
        ["a.scale", "a.plane"],
        ["b.none", "b.scale", "b.plane"],
    ]
    assert weight_map["b.plane"] == "model-plane-0-00002-of-00002.safetensors"


def test_files_are_closed_when_they_are_full(tmp_path):
    shards = Shards(tmp_path, {"base": 4096}, shard_bytes=20)
    for number in range(5):
        shards.append("base", {f"t{number}": torch.zeros(8, dtype=torch.uint8)})
    shards.append("base", {"large": torch.zeros(100, dtype=torch.uint8)})
    assert [shard["bytes"] for shard in shards.state["base"]] == [16, 16, 8, 100]


@pytest.mark.parametrize("cut", ["behind", "between", "stray"])
def test_a_crash_costs_what_was_not_journaled(unbroken, tmp_path, cut):
    folder = tmp_path / "broken"
    folder.mkdir()
    shards = Shards(folder, ROOMS)
    shards.append("plane-0", FIRST)
    shards.sync()
    state = json.loads(json.dumps(shards.state))
    if cut != "between":
        shards.append("plane-0", {"b.none": SECOND["b.none"], "b.scale": SECOND["b.scale"]})  # and then the power went
    if cut == "stray":
        (folder / "base-00001.growing").write_bytes(b"half of something")
    again = Shards(folder, ROOMS, state)
    again.recover()
    again.append("plane-0", SECOND)
    again.sync()
    assert again.place(["plane-0"]) == unbroken[2]
    assert contents(folder) == contents(unbroken[0])


def test_placing_may_be_repeated(unbroken):
    folder, shards, placed = unbroken
    before = contents(folder)
    again = Shards(folder, ROOMS, json.loads(json.dumps(shards.state)))
    again.recover()
    assert again.place(["plane-0"]) == placed and contents(folder) == before


def test_a_file_that_lost_bytes(tmp_path):
    shards = Shards(tmp_path, ROOMS)
    shards.append("plane-0", FIRST)
    (tmp_path / "plane-0-00001.growing").write_bytes(b"")
    with pytest.raises(ValueError, match="plane-0-00001.growing has 0 bytes, .* start again with --no-resume"):
        shards.recover()


def test_tensors_of_a_group_that_was_not_placed(tmp_path):
    shards = Shards(tmp_path, {"residuals": 4096})
    table = torch.rand(3, 9)
    shards.append("residuals", {"x.residuals": table})
    assert torch.equal(shards.read("residuals")["x.residuals"], table) and shards.read("base") == {}


def test_too_little_room(tmp_path):
    shards = Shards(tmp_path, {"base": 64})
    shards.append("base", {"a.rather.long.name": torch.ones(8)})
    with pytest.raises(ValueError, match="the header of .* needs .* bytes, 56 were kept"):
        shards.place(["base"])
