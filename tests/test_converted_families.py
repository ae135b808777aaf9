"""Every language model of transformers with routed experts, converted layer by layer and in memory: the same checkpoint."""

import json

import pytest
import torch

import dpamoe
from dpamoe import calibration, checkpoint, convert, storage

from .test_whole_models import CANNOT_SAVE, ids, language_model, model_types

SPEC = dpamoe.EncodeSpec(group_size=16, iterations=0, k_max=4)
INFINITE = {"granitemoehybrid", "nemotron_h"}  # their configs hold infinity, which only `convert` can write
NONE = {"doge"}  # no site is found in it
TOLERANCE = 1e-5  # residual tables: some models compute a little differently with a cache, which convert does without
AT_LEAST = 50


def tensors(folder):
    index = json.loads((folder / checkpoint.INDEX).read_text())
    files = {name: file for name, file in index["weight_map"].items() if file == checkpoint.RESIDUALS}
    return index["hashes"], checkpoint.read_tensors(folder, files)


def compare(kind, folder, monkeypatch):
    """Convert a tiny model both ways and compare; returns whether there was anything to compare."""
    tokens = ids(4, 40)
    monkeypatch.setattr(
        convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, tokens.flatten())
    )
    language_model(kind).save_pretrained(folder / "source")
    job = convert.Job(folder / "source", folder / "streamed", SPEC)
    if kind in CANNOT_SAVE | NONE:
        with pytest.raises(ValueError, match="no routed experts that can be encoded"):
            convert.convert(job)
        return False
    convert.convert(job)
    model = dpamoe.load(folder / "streamed")
    if kind in INFINITE:
        return False
    expected = dpamoe.transform(storage.load_original(folder / "source"), calibration=tokens, spec=SPEC)
    dpamoe.save(expected, folder / "memory")
    (hashes, tables), (other_hashes, other_tables) = tensors(folder / "streamed"), tensors(folder / "memory")
    assert hashes == other_hashes and tables.keys() == other_tables.keys()
    for name, table in other_tables.items():
        torch.testing.assert_close(tables[name], table, rtol=TOLERANCE, atol=0)
    settings, others = (checkpoint.read_config(folder / name) for name in ("streamed", "memory"))
    assert settings == others
    assert dpamoe.report(model).experts == dpamoe.report(expected).experts
    return True


@pytest.mark.parametrize("kind", ["gpt_oss", "jamba", "longcat_flash", "minimax"])
def test_a_few_families(kind, tmp_path, monkeypatch):
    if kind in model_types():
        assert compare(kind, tmp_path, monkeypatch)


@pytest.mark.slow
def test_all_families(tmp_path, monkeypatch):
    done = 0
    for kind in model_types():
        (tmp_path / kind).mkdir()
        done += compare(kind, tmp_path / kind, monkeypatch)
    assert done >= AT_LEAST
