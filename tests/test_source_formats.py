"""Every form in which weights are published, converted: the bytes of the model that it means. Writes the table of README.md.

`python -m tests.test_source_formats` writes the table anew.
"""

import json
from pathlib import Path

import pytest
import torch

import dpamoe
from dpamoe import calibration, checkpoint, convert, storage

from . import sources

README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = ("<!-- table: formats -->", "<!-- end: formats -->")
SPEC = dpamoe.EncodeSpec(group_size=32, iterations=0, k_max=3)


def typed(dtype):
    """A folder that is stored in one type."""

    def make(plain, model, folder):
        source = sources.rewritten(plain, folder, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
        sources.change_config(source, dtype=str(dtype).removeprefix("torch."))
        return source, source

    return make


def with_exponents(plain, model, folder):
    """FP8 whose scales are powers of two, stored as their exponents."""
    source, meant = sources.fp8(plain, folder / "source", 32, exponents=True)
    return source, meant


def in_mxfp4(plain, model, folder):
    """gpt-oss as it is published."""
    return sources.mxfp4(plain, folder / "source")


def head_twice(plain, model, folder):
    """A tied head that is stored a second time."""
    both = {"lm_head.weight": model.state_dict()["lm_head.weight"].clone()}
    return sources.rewritten(plain, folder, lambda tensors: {**tensors, **both}), plain


TIED = {"tie_word_embeddings": True}
# What the table says of a source and how it is read; a family, changes of its config, and what makes the source of a plain
# folder and its model: the source, and a folder that means the same.
FORMATS = [
    ("bf16", "itself", "qwen3_moe", {}, typed(torch.bfloat16)),
    ("fp16", "itself", "qwen3_moe", {}, typed(torch.float16)),
    ("fp32", "itself", "qwen3_moe", {}, typed(torch.float32)),
    ("one file, or many with an index", "itself", "olmoe", {}, lambda p, m, f: (sources.sharded(p, f), p)),
    ("a tensor for each expert", "itself, a few experts at a time", "mixtral", {}, lambda p, m, f: (p, p)),
    ("experts stacked", "itself", "mixtral", {}, lambda p, m, f: (sources.fused(m, p, f), p)),
    ("FP8, block scales `weight_scale_inv`", "its values in the model's type", "deepseek_v3", {},
     lambda p, m, f: sources.fp8(p, f / "source", 32)),
    ("FP8, block scales `scale`, blocks that do not divide the weight", "its values in the model's type", "deepseek_v3", {},
     lambda p, m, f: sources.fp8(p, f / "source", 24, "scale")),
    ("FP8, block scales as exponents (ue8m0)", "its values in the model's type", "qwen3_moe", {}, with_exponents),
    ("mxfp4 blocks and scales", "its values in the model's type", "gpt_oss", {}, in_mxfp4),
    ("head tied to the embedding, stored once", "one tensor", "qwen3_moe", TIED, lambda p, m, f: (p, p)),
    ("head tied to the embedding, stored twice", "one tensor", "qwen3_moe", TIED, head_twice),
]  # fmt: skip


@pytest.mark.parametrize("words, read, family, config, make", FORMATS, ids=[row[0] for row in FORMATS])
def test_a_source_is_the_model_that_it_means(
    words, read, family, config, make, random_model, random_ids, tmp_path, monkeypatch
):
    model, ids = random_model(family, config), random_ids(4, 60)
    (tmp_path / "new").mkdir()
    source, meant = make(sources.per_expert(model, tmp_path / "plain"), model, tmp_path / "new" / "model")
    monkeypatch.setattr(
        convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, ids.flatten())
    )
    convert.convert(convert.Job(source, tmp_path / "streamed", SPEC, dpamoe.SpendSpec(2.0)))
    expected = dpamoe.transform(storage.load_original(meant), 2.0, calibration=ids, spec=SPEC)
    dpamoe.save(expected, tmp_path / "memory")
    found, wanted = (json.loads((tmp_path / name / checkpoint.INDEX).read_text()) for name in ("streamed", "memory"))
    assert found["hashes"] == wanted["hashes"] and found["weight_map"].keys() == wanted["weight_map"].keys()
    name = checkpoint.RESIDUALS
    assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()
    tokens = random_ids(2, 20)
    with torch.no_grad():
        assert torch.equal(dpamoe.load(tmp_path / "streamed")(tokens).logits, dpamoe.load(tmp_path / "memory")(tokens).logits)


def table() -> str:
    """One line for each format."""
    lines = ["| source | read as | tried on |", "|---|---|---|"]
    return "\n".join(lines + [f"| {words} | {read} | {family} |" for words, read, family, *_ in FORMATS])


def split_readme() -> tuple[str, str, str]:
    """What stands before the table in README.md, the table, and what follows."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    between, after = rest.split(MARKS[1])
    return before, between.strip("\n"), after


def test_readme_shows_the_formats():
    assert split_readme()[1] == table(), "run `python -m tests.test_source_formats`, which writes it"


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")
