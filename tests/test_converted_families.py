"""Every language model of transformers with routed experts, converted layer by layer and in memory: the same checkpoint.

`python -m tests.test_converted_families` converts all of them and writes their table in README.md.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

import dpamoe
from dpamoe import calibration, checkpoint, convert, storage

from .test_whole_models import CANNOT_SAVE, ids, language_model, model_types

SPEC = dpamoe.EncodeSpec(group_size=16, iterations=0, k_max=4)
INFINITE = {"granitemoehybrid", "nemotron_h"}  # their configs hold infinity, which only `convert` can write
NONE = {"doge"}  # no site is found in it
TOLERANCE = 1e-5  # residual tables: some models compute a little differently with a cache, which convert does without
AT_LEAST = 50
README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = ("<!-- table: converted -->", "<!-- end: converted -->")
SAME = "the same bytes as `transform` and `save` give in memory; loaded again"
ALONE = "loaded again; infinity in their config, which only `convert` can write"
REFUSED = "refused: their experts become graphs, or none are found"


def tensors(folder):
    index = json.loads((folder / checkpoint.INDEX).read_text())
    files = {name: file for name, file in index["weight_map"].items() if file == checkpoint.RESIDUALS}
    return index["hashes"], checkpoint.read_tensors(folder, files)


def compare(kind, folder, monkeypatch):
    """Convert a tiny model both ways and compare; returns what came of it, as the table says it."""
    tokens = ids(4, 40)
    monkeypatch.setattr(
        convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, tokens.flatten())
    )
    language_model(kind).save_pretrained(folder / "source")
    job = convert.Job(folder / "source", folder / "streamed", SPEC)
    if kind in CANNOT_SAVE | NONE:
        with pytest.raises(ValueError, match="no routed experts that can be encoded"):
            convert.convert(job)
        return REFUSED
    convert.convert(job)
    model = dpamoe.load(folder / "streamed")
    if kind in INFINITE:
        return ALONE
    expected = dpamoe.transform(storage.load_original(folder / "source"), calibration=tokens, spec=SPEC)
    dpamoe.save(expected, folder / "memory")
    (hashes, tables), (other_hashes, other_tables) = tensors(folder / "streamed"), tensors(folder / "memory")
    assert hashes == other_hashes and tables.keys() == other_tables.keys()
    for name, table in other_tables.items():
        torch.testing.assert_close(tables[name], table, rtol=TOLERANCE, atol=0)
    settings, others = (checkpoint.read_config(folder / name) for name in ("streamed", "memory"))
    assert settings == others
    assert dpamoe.report(model).experts == dpamoe.report(expected).experts
    return SAME


@pytest.mark.parametrize("kind", ["gpt_oss", "jamba", "longcat_flash", "minimax"])
def test_a_few_families(kind, tmp_path, monkeypatch):
    if kind in model_types():
        assert compare(kind, tmp_path, monkeypatch) == SAME


def outcomes(folder, monkeypatch, kinds):
    """Model types by what came of their conversion."""
    found = {SAME: [], ALONE: [], REFUSED: []}
    for kind in kinds:
        (folder / kind).mkdir()
        found[compare(kind, folder / kind, monkeypatch)].append(kind)
    return found


@pytest.mark.slow
def test_all_families(tmp_path, monkeypatch):
    shown = shown_release() == transformers.__version__
    found = outcomes(tmp_path, monkeypatch, [kind for kind in model_types() if shown or kind in named()])
    assert len(found[SAME]) >= AT_LEAST
    if shown:
        assert table(found) == split_readme()[1], "run `python -m tests.test_converted_families`, which writes it"


def table(found):
    """The table of README.md."""
    lines = [f"{sum(map(len, found.values()))} language models of transformers {transformers.__version__}:", ""]
    lines += ["| result | | model types |", "|---|---|---|"]
    return "\n".join(lines + [f"| {words} | {len(kinds)} | {', '.join(kinds)} |" for words, kinds in found.items()])


def split_readme():
    """What stands before the table in README.md, the table, and what follows."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    between, after = rest.split(MARKS[1])
    return before, between.strip("\n"), after


def shown_release():
    """The release of transformers that the table is of."""
    return re.search(r"of transformers ([\d.]+):", split_readme()[1])[1]


def rows():
    """Lines of the table, in cells."""
    return [line.split("|") for line in split_readme()[1].splitlines()[4:]]


def named():
    """Model types in the table; those of a later release are tried by the tests of whole models alone."""
    return [kind for row in rows() for kind in row[3].strip().split(", ")]


def test_readme_names_every_family():
    if shown_release() != transformers.__version__:
        pytest.skip("the table in README.md is of another release of transformers")
    assert sorted(named()) == sorted(model_types())
    assert [int(row[2]) for row in rows()] == [len(row[3].split(", ")) for row in rows()]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
        text = table(outcomes(Path(folder), patched, model_types()))
    before, _, after = split_readme()
    README.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")
