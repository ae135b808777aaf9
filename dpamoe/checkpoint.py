"""Encoded checkpoints on disk: one tensor per plane, files grouped by plane, written whole or not at all.

    config.json                       the model's config with a quantization_config of quant_method "dpamoe"
    dpamoe.index.json                 tensor -> file, and the size of every file
    model-base-*.safetensors          everything but expert planes: router, attention, offsets, tied scales, biases
    model-plane-{c}-*.safetensors     plane c and its scales, all sites
    model-residuals.safetensors       residual tables

The index has a name of its own, so that a loader that does not know dpamoe finds no weights instead of making some up.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dpamoe import program
from dpamoe.files import read_json, sync, write_json
from dpamoe.kernels.layout import EncodedWeight, groups_of
from dpamoe.modules import EncodedExperts, encoded_experts
from dpamoe.sites import Site
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.threshold import BINS

FORMAT_VERSION = 1
INDEX = "dpamoe.index.json"
RESIDUALS = "model-residuals.safetensors"
IMPORTANCE = ("sensitivity", "gate_counts")  # tensors of a site that lie beside its residual table, if they were measured
JOURNAL = "dpamoe.journal.json"  # what a conversion under way has done, in the folder it writes
MARKER = "dpamoe.unfinished"  # stands in a folder that is being written, and in none that is whole
SHARD_BYTES = 4 << 30
LARGEST_HEADER = 100_000_000  # that safetensors reads
AGAIN = "copy it again from the source"


def tensor_groups(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a transformed model under the file group it belongs to: base, plane-{c}, residuals."""
    held = encoded_experts(model)
    groups: dict[str, dict[str, Tensor]] = {"base": {}}
    seen: set[tuple] = set()
    for name, tensor in model.state_dict().items():
        path = next((path for path in held if name.startswith(path + ".")), None)
        group = "base" if path is None else group_of(name.removeprefix(path + "."))
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if group != "base" or tensor.numel() == 0 or key not in seen:  # tied weights are written once
            groups.setdefault(group, {})[name] = tensor
        if group == "base":
            seen.add(key)
    return groups


def group_of(name: str) -> str:
    """The file group of a tensor of encoded experts, by its name inside the module."""
    if name in ("residuals", *IMPORTANCE):
        return "residuals"
    *_, kind, number = ("", *name.split("."))
    return f"plane-{number}" if kind in ("plane", "scale") else "base"


def write(model: nn.Module, out: Path, config: dict, extra: Callable[[Path], None]) -> None:
    """Write a transformed model into the new folder `out`: into out.partial first, synced, then renamed.

    config: the contents of config.json. extra: adds tokenizer, card and the like to the folder it is given. Raises
    ValueError if `out` exists. A leftover out.partial of an earlier, broken run is replaced.
    """
    check_new(out)
    partial = partial_of(out)
    if (partial / JOURNAL).exists():
        raise ValueError(f"{partial} holds an unfinished `dpamoe convert`: run that again to finish it, or delete the folder")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    (partial / MARKER).touch()
    index = new_index()
    for group, tensors in tensor_groups(model).items():
        _write_group(partial, group, tensors, index)
    write_json(partial / "config.json", config)
    extra(partial)
    write_json(partial / INDEX, index)
    (partial / MARKER).unlink()
    for file in sorted(partial.rglob("*")):
        sync(file)
    sync(partial)
    partial.rename(out)
    sync(out.parent)


def new_index() -> dict[str, dict]:
    """An index without tensors: weight_map (tensor -> file), files (file -> bytes), hashes (tensor -> sha256 of its data).

    Residual tables have no hash: `dpamoe profile` replaces them in one step.
    """
    return {"metadata": {"format": "dpamoe", "version": FORMAT_VERSION}, "weight_map": {}, "files": {}, "hashes": {}}


def sha256(tensor: Tensor) -> str:
    """Hash of a tensor's data as a file holds it."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(data.view(torch.uint8).numpy() if data.numel() else b"").hexdigest()


def check_new(out: Path) -> None:
    """Raise ValueError if the output folder exists already, or cannot be made."""
    if out.exists() or out.is_symlink():
        remedy = ", or delete it first" if (out / INDEX).is_file() else ""
        raise ValueError(f"output folder {out} exists: choose another name{remedy}")
    if not out.parent.is_dir():
        raise ValueError(f"folder {out.parent}, which should hold {out.name}, does not exist: make it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ValueError(f"folder {out.parent}, which should hold {out.name}, cannot be written to: choose another place")
    partial = partial_of(out)
    if partial.exists() and not (partial / MARKER).is_file():
        raise ValueError(f"{partial} is in the way and not from a broken conversion: move it, or choose another name")


def partial_of(out: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return out.with_name(out.name + ".partial")


def _write_group(folder: Path, group: str, tensors: dict[str, Tensor], index: dict) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += nbytes
    for number, shard in enumerate(shards, 1):
        file = RESIDUALS if group == "residuals" else f"model-{group}-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        index["weight_map"] |= dict.fromkeys(shard, file)
        index["files"][file] = (folder / file).stat().st_size
        if group != "residuals":  # which are measured anew at will
            index["hashes"] |= {name: sha256(tensor) for name, tensor in shard.items()}


def quantization_config(model: nn.Module, budget: float, source: str | None) -> dict:
    """The quantization_config of a transformed model (design: Hugging Face conventions). source: a relative path or None."""
    held = encoded_experts(model)
    first = next(iter(held.values()))
    sites = [experts.site.as_dict() for experts in held.values()]
    unreached = {path: experts.unreached for path, experts in held.items() if experts.unreached}
    return settings_of(first.spec, replace(first.spend, budget=budget), source, sites, unreached)


def settings_of(
    spec: EncodeSpec, spend: SpendSpec, source: str | None, sites: list[dict], unreached: dict[str, list[int]]
) -> dict:  # fmt: skip
    """A quantization_config of its parts; sites as dictionaries."""
    return {
        "quant_method": "dpamoe",
        "version": FORMAT_VERSION,
        **spec.as_dict(),
        "default_budget": spend.budget,
        "budget_scope": spend.scope,
        "skip": spend.skip,
        "allocator": spend.allocator,
        "source": source,
        "sites": sites,
        "unreached": unreached,
    }


def read_config(folder: str | Path) -> dict:
    """config.json of an encoded folder; ValueError, saying what is wrong, for any other folder."""
    folder = Path(folder)
    file = folder / "config.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a model in Hugging Face format")
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    if not file.is_file():
        below = sorted(other.parent.name for other in folder.glob("*/config.json"))
        hint = f", such as {folder / below[0]}, one of {len(below)} inside of it" if below else " in Hugging Face format"
        raise ValueError(f"{folder} has no config.json: give a model folder{hint}")
    return read_json(file, AGAIN)


def is_encoded(folder: str | Path) -> bool:
    """Whether a model folder holds a dpamoe checkpoint."""
    return (read_config(folder).get("quantization_config") or {}).get("quant_method") == "dpamoe"


def read_index(folder: str | Path, k_max: int | None = None, without_residuals: bool = False) -> tuple[dict, dict[str, str]]:
    """Check an encoded folder before anything is read; returns its quantization_config and tensor -> file for k_max planes.

    Every file needed must be there with the size that its header and the index give. Files of planes beyond k_max are not
    opened. ValueError names the file, expected and found size, and what to do.
    """
    folder = Path(folder)
    settings = read_config(folder).get("quantization_config") or {}
    if settings.get("quant_method") != "dpamoe":
        raise ValueError(f"{folder} is not a dpamoe checkpoint: convert the model first (dpamoe convert)")
    if (folder / MARKER).exists():
        raise ValueError(f"{folder} is being written, or was left unfinished: run the same command again, which finishes it")
    if settings.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format version {settings.get('version')}, this dpamoe reads version {FORMAT_VERSION}: "
            "convert the model again, or install the matching dpamoe"
        )
    lacking = [name for name in (*EncodeSpec.__dataclass_fields__, "default_budget", "sites") if name not in settings]
    if lacking:
        raise ValueError(f"{folder / 'config.json'} lacks {', '.join(lacking)} in quantization_config: convert the model again")
    held = settings["k_max"]
    if k_max is not None and not settings["k_min"] <= k_max <= held:
        raise ValueError(f"k_max {k_max} asked of a checkpoint with planes {settings['k_min']} to {held}: use one of these")
    file = folder / INDEX
    if not file.is_file():
        raise ValueError(f"{folder} has no {INDEX}: the conversion is incomplete, run it again")
    index = read_json(file, AGAIN)
    if not {"weight_map", "files"} <= index.keys():
        raise ValueError(f"{file} lacks weight_map or files: copy it again, or convert the model again")
    missing = expected_tensors(settings) - index["weight_map"].keys()
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} tensors, such as {min(missing)}: convert the model again")
    dropped = tuple(f"model-plane-{c}-" for c in range(k_max or held, held)) + ((RESIDUALS,) if without_residuals else ())
    needed = {name: f for name, f in index["weight_map"].items() if not f.startswith(dropped)}
    for name in sorted(set(needed.values())):
        _check_file(folder / name, index["files"].get(name))
    return settings, needed


def expected_tensors(settings: dict) -> set[str]:
    """Names of all encoded tensors that a checkpoint with this quantization_config must hold."""
    kinds = [f"plane.{c}" for c in range(settings["k_max"])] + ["offset"]
    shared = [f"scale.{c}" for c in range(settings["k_max"])]
    kinds += ["scale", "unit"] if settings["scale_mode"] == "tied" else shared
    names = [f"{weight}.{kind}" for weight in ("gate_up_proj", "down_proj") for kind in kinds] + ["residuals"]
    return {f"{site['path']}.{name}" for site in settings["sites"] for name in names}


def _check_file(file: Path, expected: int | None) -> None:
    if not file.is_file() and file.name == RESIDUALS:
        raise ValueError(f"{file} is missing: make it again with `dpamoe profile {file.parent.name} --calibration FILE`")
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is incomplete, copy or convert it again")
    found = file.stat().st_size
    if found != expected:
        raise ValueError(f"{file} has {found} bytes, {expected} were written: it is truncated or changed, copy it again")
    check_header(file)


def tensor_bytes(folder: str | Path, files: Iterable[str]) -> dict[str, int]:
    """Bytes of every tensor in these files of a folder, by the headers."""
    return {name: size for file in files for name, (_, size) in check_header(Path(folder) / file).items()}


def read_header(file: Path) -> tuple[int, dict[str, dict]]:
    """Where the data of a safetensors file starts, and dtype, shape and data_offsets of each tensor.

    Raises ValueError, with both sizes, unless the file is as long as its header says.
    """
    found = file.stat().st_size
    with file.open("rb") as handle:
        header = int.from_bytes(handle.read(8), "little")
        if found < 8 + header < LARGEST_HEADER:
            raise ValueError(f"{file} has {found} bytes, its header alone takes {8 + header}: it is truncated, copy it again")
        try:
            entries = json.loads(handle.read(min(header, found)))
            entries.pop("__metadata__", None)
            end = 8 + header + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            complete = all(
                len(entry["data_offsets"]) == 2 and entry["dtype"] and "shape" in entry for entry in entries.values()
            )
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file} has no readable safetensors header: copy it again") from error
    if not complete:
        raise ValueError(f"{file} has no readable safetensors header: copy it again")
    if end != found:
        raise ValueError(f"{file} has {found} bytes, its header describes {end}: it is truncated or padded, copy it again")
    return 8 + header, entries


def check_header(file: Path) -> dict[str, tuple[str, int]]:
    """Dtype and bytes of each tensor in a safetensors file; ValueError as in `read_header`."""
    _, entries = read_header(file)
    return {name: (entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0]) for name, entry in entries.items()}


def read_hashes(folder: str | Path) -> dict[str, str]:
    """sha256 of tensors as they were written; empty for a folder that was written before there were any."""
    return read_json(Path(folder) / INDEX, AGAIN).get("hashes", {})


def read_tensors(folder: str | Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    """Read the named tensors; ValueError if a file does not hold a tensor that the index puts there."""
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    tensors = {}
    for file, names in by_file.items():
        try:
            with safe_open(Path(folder) / file, "pt") as handle:
                present = set(handle.keys())
                for name in names:
                    if name not in present:
                        raise ValueError(
                            f"{Path(folder) / file} lacks tensor {name}, which the index puts there: convert again"
                        )
                    tensors[name] = handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{Path(folder) / file} cannot be read as safetensors ({error}): copy it again") from error
    return tensors


def spec_of(settings: dict) -> EncodeSpec:
    """How a folder was encoded, by its quantization_config."""
    return EncodeSpec(**{name: settings[name] for name in EncodeSpec.__dataclass_fields__})


def spend_of(settings: dict) -> SpendSpec:
    """How a folder spends unless it is told otherwise, by its quantization_config; what an older one lacks is as it was."""
    return SpendSpec(
        settings["default_budget"], scope=settings.get("budget_scope", "token"), skip=settings.get("skip", False),
        allocator=settings.get("allocator", "exact"),
    )  # fmt: skip


def is_weighed(settings: dict, names: Iterable[str]) -> bool:
    """Whether a folder with these tensors holds what the allocator "threshold" needs of every site."""
    wanted = {f"{site['path']}.{name}" for site in settings["sites"] for name in IMPORTANCE}
    return bool(wanted) and wanted <= set(names)


def build_experts(site: Site, settings: dict, tensors: dict[str, Tensor], planes: int) -> EncodedExperts:
    """Take one site's tensors out of `tensors` and make its module; ValueError names a tensor that is missing or misshaped."""
    spec = spec_of(settings)

    def take(name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], optional: bool = False) -> Tensor | None:
        tensor = tensors.pop(f"{site.path}.{name}", None)
        if tensor is None and optional:
            return None
        if tensor is None:
            raise ValueError(f"tensor {site.path}.{name} is missing from the checkpoint: convert the model again")
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"tensor {site.path}.{name} is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)} of "
                f"{' or '.join(map(str, dtypes))}: the checkpoint is damaged, convert the model again"
            )
        return tensor

    up = _take_weight(take, "gate_up_proj", (site.experts, site.up_rows, site.hidden), spec, planes)
    down = _take_weight(take, "down_proj", (site.experts, site.out, site.inner), spec, planes)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    up_bias = take("up_bias", (site.experts, site.up_rows), floats) if site.layout.up_biases else None
    down_bias = take("down_bias", (site.experts, site.out), floats) if site.layout.down_bias else None
    names = program.parameters_of(site.program) + program.parameters_of(site.post)
    held = {}
    for name in names:
        tensors_of = "act" if name in program.parameters_of(site.program) else "post"
        stored = f"{site.path}.{tensors_of}.{name.replace('.', '_')}"
        if stored not in tensors:
            raise ValueError(f"tensor {stored} is missing from the checkpoint: convert the model again")
        held[name] = tensors.pop(stored)
    residuals = take("residuals", (site.experts, settings["k_max"] + 1), (torch.float32,))
    experts = EncodedExperts(site, spec, up, down, up_bias, down_bias, residuals, held)
    experts.unreached = settings.get("unreached", {}).get(site.path, [])
    importance = [
        take(IMPORTANCE[0], (), (torch.float32,), optional=True),
        take(IMPORTANCE[1], (site.experts, BINS), (torch.int32,), optional=True),
    ]
    if None not in importance:
        experts.set_importance(*importance)
    return experts


def _take_weight(take, name: str, shape: tuple[int, int, int], spec: EncodeSpec, planes: int) -> EncodedWeight:
    experts, out_features, in_features = shape
    per_group = (experts, out_features, groups_of(in_features, spec.group_size))
    packed = [take(f"{name}.plane.{c}", (experts, out_features, -(-in_features // 8)), (torch.uint8,)) for c in range(planes)]
    if spec.scale_mode == "tied":
        scales = [take(f"{name}.scale", per_group, (torch.uint8,))]
        offset, unit = take(f"{name}.offset", per_group, (torch.int8,)), take(f"{name}.unit", (experts,), (torch.float32,))
    else:
        floats = (torch.float16, torch.float32)
        scales = [take(f"{name}.scale.{c}", per_group, floats) for c in range(planes)]
        offset, unit = take(f"{name}.offset", per_group, floats), None
    return EncodedWeight(packed, scales, offset, unit, in_features, spec.group_size)
