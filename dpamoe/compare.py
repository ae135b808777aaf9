"""Compare an encoded folder with the model it was made from: sampled experts encoded again, other tensors byte for byte."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dpamoe import checkpoint
from dpamoe.encode import encode
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.layers import on_meta
from dpamoe.mapping import Mapping, drop_part, load_part, make_mapping, make_tensors
from dpamoe.profile import weight_error
from dpamoe.progress import track
from dpamoe.sites import Site, gather
from dpamoe.source import Source, open_source
from dpamoe.spec import EncodeSpec

EXPERTS = 4  # of each sampled site
SLACK = 1.02  # between the errors of two encoders of equal quality; a GPU ends in other codes than a CPU


@dataclass(frozen=True)
class Finding:
    """One thing that was compared: a site or a tensor; same: byte for byte; error and expected: of the worst expert, k = C."""

    name: str
    same: bool
    good: bool
    reason: str = ""
    error: float | None = None
    expected: float | None = None


def verify(folder: str | Path, original: str | Path, samples: int = 2, seed: int = 0) -> list[Finding]:
    """Encode some experts of `samples` layers of the original again and compare; as many other tensors, byte for byte.

    An expert is good if its bytes are equal, or its error at all planes is no more than 2 % above that of a fresh encoding.
    Raises ValueError if a folder is damaged or the original has other sites.
    """
    folder = Path(folder)
    settings, weight_map = checkpoint.read_index(folder)
    source = open_source(original)
    model = on_meta(source)
    mapping = make_mapping(model, source)
    order = random.Random(seed)
    sites = [Site.from_dict(fields) for fields in settings["sites"]]
    chosen = order.sample(sites, min(samples, len(sites)))
    findings = []
    for site in track(chosen, "verify", lambda site: site.path):
        findings.append(_site(folder, settings, weight_map, site, model, mapping, source, order))
    replaced = tuple(f"{site.path}." for site in sites)
    others = [name for name in mapping.wanted if not name.startswith(replaced)]
    for name in order.sample(others, min(4 * samples, len(others))):
        findings.append(_tensor(folder, weight_map, name, make_tensors(mapping, model, source, [name])[name]))
    return findings


def _tensor(folder: Path, weight_map: dict[str, str], name: str, expected: Tensor) -> Finding:
    if name not in weight_map:
        return Finding(name, False, False, f"{folder} lacks it: convert the model again")
    found = checkpoint.read_tensors(folder, {name: weight_map[name]})[name]
    same = (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and checkpoint.sha256(found) == checkpoint.sha256(expected)
    )
    return Finding(name, same, same, "" if same else "it is not what the original holds: convert the model again")


def _site(
    folder: Path, settings: dict, weight_map: dict[str, str], site: Site, model: nn.Module, mapping: Mapping, source: Source,
    order: random.Random,
) -> Finding:  # fmt: skip
    names = mapping.below(site.path)
    if not names:
        raise ValueError(f"{source.folder} has no module {site.path}, which {folder} encodes: give the model it was made from")
    own = {name: file for name, file in weight_map.items() if name.startswith(site.path + ".")}
    tensors = checkpoint.read_tensors(folder, own)
    held = checkpoint.build_experts(site, settings, tensors, settings["k_max"])
    load_part(mapping, model, source, names)
    try:
        weights = gather(model.get_submodule(site.path), site.layout, site.experts)
        pairs = [(weights.up, held.gate_up_proj.weight), (weights.down, held.down_proj.weight)]
        if any(float_.shape[:2] != encoded.planes[0].shape[:2] for float_, encoded in pairs):
            raise ValueError(
                f"{site.path} of {source.folder} has another shape than in {folder}: give the model it was made from"
            )
        experts = sorted(order.sample(range(site.experts), min(EXPERTS, site.experts)))
        spec = checkpoint.spec_of(settings)
        results = [_expert(own_, encoded, expert, spec) for own_, encoded in pairs for expert in experts]
    finally:
        drop_part(mapping, model, names)
    same = all(result[0] for result in results)
    _, error, expected = max(results, key=lambda result: result[1] / max(result[2], 1e-30))
    good = same or error <= SLACK * expected + 1e-12
    reason = "" if good else "its planes are not those of the original's weights: convert the model again"
    return Finding(site.path, same, good, reason, error, expected)


def _expert(weight: Tensor, held: EncodedWeight, expert: int, spec: EncodeSpec) -> tuple[bool, float, float]:
    """Whether one expert encodes to the same bytes, its relative squared error as held, and as encoded now."""
    fresh = encode(weight[expert : expert + 1].contiguous(), spec)
    new, old = fresh.tensors(), held.tensors()
    same = all(new[name].dtype == old[name].dtype and torch.equal(new[name][0], old[name][expert]) for name in new)
    part = {name: tensor[expert : expert + 1] for name, tensor in old.items()}
    planes = [part[f"plane.{c}"] for c in range(len(held.planes))]
    scales = [part["scale"]] if held.unit is not None else [part[f"scale.{c}"] for c in range(len(held.planes))]
    one = EncodedWeight(planes, scales, part["offset"], part.get("unit"), held.in_features, held.group_size)
    alone = weight[expert : expert + 1]
    return same, float(weight_error(alone, one, 0)[-1]), float(weight_error(alone, fresh, 0)[-1])


def check_hashes(folder: str | Path) -> int:
    """Read every tensor that has a hash in the index and compare; returns how many, ValueError names one that differs.

    Residual tables, which have none, must be finite and not rise with the number of planes.
    """
    folder = Path(folder)
    _, weight_map = checkpoint.read_index(folder)
    hashes = checkpoint.read_hashes(folder)
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name)
    for file, names in tqdm(sorted(files.items()), desc="check", delay=1.0, disable=None):
        for name in names:
            tensor = checkpoint.read_tensors(folder, {name: file})[name]
            if name in hashes and checkpoint.sha256(tensor) != hashes[name]:
                raise ValueError(
                    f"{folder / file}: {name} has other bytes than were written: copy the file again, or convert again"
                )
            if file == checkpoint.RESIDUALS and not _is_table(tensor):
                raise ValueError(
                    f"{folder / file}: {name} is no table of errors: make it again with `dpamoe profile {folder.name}`"
                )
    return len(hashes)


def _is_table(table: Tensor) -> bool:
    return bool(torch.isfinite(table).all()) and bool((table >= 0).all())
