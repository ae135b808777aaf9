"""Encoded folders beside their originals: what is equal, what is as good, and what is neither."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import checkpoint
from dpamoe.cli.main import main
from dpamoe.compare import check_hashes, verify

from . import sources


@pytest.fixture
def copy(tiny_saved, tmp_path):
    return shutil.copytree(tiny_saved, tmp_path / "copy")


def damaged(folder, file, change):
    tensors = load_file(folder / file)
    change(tensors)
    size = (folder / file).stat().st_size
    save_file(tensors, folder / file, metadata={"format": "pt"})
    assert (folder / file).stat().st_size == size


def test_the_right_original(tiny_saved, tiny_dir):
    findings = verify(tiny_saved, tiny_dir, samples=2)
    assert len(findings) == 10 and all(finding.same and finding.good for finding in findings)
    assert [finding.name for finding in findings] == [finding.name for finding in verify(tiny_saved, tiny_dir, samples=2)]
    assert len(verify(tiny_saved, tiny_dir, samples=99, seed=3)) > 40


def test_codes_of_another_encoder_are_as_good(copy, tiny_dir):
    """A scale that is a hair off gives other bytes and the same quality."""
    name = "model.layers.0.mlp.experts.gate_up_proj.scale.7"

    def nudge(tensors):
        tensors[name].mul_(1.001)

    damaged(copy, "model-plane-7-00001-of-00001.safetensors", nudge)
    findings = {finding.name: finding for finding in verify(copy, tiny_dir, samples=4)}
    found = findings["model.layers.0.mlp.experts"]
    assert found.good and not found.same and found.error == pytest.approx(found.expected, rel=0.02)


def test_another_model(copy, tiny_dir, tmp_path):
    def shuffle(tensors):
        for name in tensors:
            if "layers.2.mlp.experts" in name:
                tensors[name] = tensors[name].flip(0).contiguous()

    other = sources.rewritten(tiny_dir, tmp_path / "other", lambda tensors: (shuffle(tensors), tensors)[1])
    findings = {finding.name: finding for finding in verify(copy, other, samples=4)}
    bad = [name for name, finding in findings.items() if not finding.good]
    assert bad == ["model.layers.2.mlp.experts"] and findings[bad[0]].error > 0.1


def test_a_byte_that_changed(copy):
    name = "model.layers.1.mlp.experts.down_proj.plane.3"
    assert check_hashes(copy) == 174

    def flip(tensors):
        tensors[name].view(-1)[5] ^= 1

    damaged(copy, "model-plane-3-00001-of-00001.safetensors", flip)
    with pytest.raises(ValueError, match=f"plane-3-00001-of-00001.safetensors: {name} has other bytes than were written"):
        check_hashes(copy)
    dpamoe.load(copy, 2.0, k_max=2)


def test_a_table_that_is_none(copy):
    damaged(copy, checkpoint.RESIDUALS, lambda t: t["model.layers.0.mlp.experts.residuals"].view(-1).__setitem__(3, torch.nan))
    with pytest.raises(ValueError, match="residuals is no table of errors: make it again with `dpamoe profile copy`"):
        check_hashes(copy)


def test_the_command(copy, tiny_dir, tmp_path, capsys):
    assert main(["verify", str(copy), str(tiny_dir), "--samples", "1"]) == 0
    assert "0 of 5 differ" in capsys.readouterr().out
    assert main(["verify", str(tiny_dir), str(tiny_dir)]) == 1
    assert "is not a dpamoe checkpoint" in capsys.readouterr().err
    os.truncate(copy / checkpoint.RESIDUALS, 100)
    assert main(["verify", str(copy), str(tiny_dir)]) == 1
    assert "model-residuals.safetensors has 100 bytes" in capsys.readouterr().err
