"""Save a transformed model as a folder, load it again, refresh its residual table."""

import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpamoe import calibration as calibrate
from dpamoe import checkpoint, origin, sensitivity
from dpamoe.allocate import project
from dpamoe.api import report, set_spend, warn_clamped
from dpamoe.files import read_json, sync, write_json
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.modules import EncodedExperts, encoded_experts
from dpamoe.own_format import keep_own_format
from dpamoe.profile import TOKENS_PER_EXPERT, record, residual_table, weight_error
from dpamoe.progress import track
from dpamoe.sites import ExpertWeights, Site, gather
from dpamoe.spec import check_budget

logger = logging.getLogger("dpamoe")
# Files of a source folder that are weights or are written anew; everything else (tokenizer, chat template, code) is copied.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack", ".onnx")
WRITTEN_ANEW = ("config.json", "generation_config.json", "README.md")

OTHER_MODEL = 0.2  # relative squared error that even two planes of the right weights stay under

CARD = """---
library_name: dpamoe
tags: [mixture-of-experts, quantized, any-precision]
---
# {name}

```python
import dpamoe
model = dpamoe.load("path/to/this/folder", budget={budget:g})
dpamoe.set_budget(model, {lower:g})  # fewer planes per expert, at once, without loading again
```

Experts of {sites} layers are encoded as {k_max} bitplanes (group size {group}, prefixes {k_min} to {k_max} decode). Once
dpamoe is imported, `AutoModelForCausalLM.from_pretrained` opens this folder too; without it no loader finds weights here.
"""


def save(model: nn.Module, out: str | Path) -> Path:
    """Write a transformed Hugging Face model into the new folder `out` and return its path.

    Written as out.partial and renamed when complete. The tokenizer, chat template and remote code of the folder the model
    came from are copied. Raises ValueError if the model is not transformed, holds fewer planes than it was encoded with, has
    no config, or `out` exists.
    """
    out, first = Path(out).absolute(), _check_savable(model)
    name = getattr(model, "name_or_path", "")
    source = Path(name).absolute() if name and Path(name).is_dir() else None
    config = plain_config(model)
    original = getattr(model, "dpamoe_source", source)  # of a model that was loaded: what its checkpoint names
    relative = None if original is None else os.path.relpath(original, out)
    config["quantization_config"] = checkpoint.quantization_config(model, first.spend.budget, relative)

    def extra(folder: Path) -> None:
        copy_companions(source, folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        (folder / "README.md").write_text(_card(out.name, model), encoding="utf-8")

    checkpoint.write(model, out, config, extra)
    origin.remember(model, out)
    return out


def plain_config(model: nn.Module) -> dict:
    """The model's config as JSON, without paths of this machine and without a quantization_config."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    plain = json.loads(model.config.to_json_string(use_diff=False))  # has its own way to write infinity
    config = {**plain, "dtype": dtype, "architectures": [type(model).__name__]}
    for name in ("_name_or_path", "transformers_weights", "quantization_config"):
        config.pop(name, None)
    return config


def _check_savable(model: nn.Module) -> EncodedExperts:
    """The first encoded experts of a model; ValueError, with the reason, if it cannot be saved."""
    held = encoded_experts(model)
    if not held:
        raise ValueError(f"{type(model).__name__} holds no encoded experts: call dpamoe.transform before dpamoe.save")
    if not hasattr(model, "config") or not hasattr(model.config, "to_dict"):
        raise ValueError(
            f"{type(model).__name__} has no Hugging Face config, without which it could not be built again on load"
        )
    if getattr(model, "dpamoe_unfinished", False):
        raise ValueError("the model is encoded in part, since transform was interrupted: call dpamoe.transform again first")
    blocks = [experts.site.path for experts in held.values() if experts.site.block]
    if blocks:
        raise ValueError(f"{blocks[0]} is now a graph, which cannot be saved yet: transform after each load")
    first = next(iter(held.values()))
    if first.held < first.spec.k_max:
        raise ValueError(
            f"the model holds {first.held} of {first.spec.k_max} planes, and was loaded with fewer than {first.spec.k_max} "
            f"planes or resized: dpamoe.resize(model, {first.spec.k_max}) reads the others, then save it"
        )
    return first


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy tokenizer, chat template, remote code and the like: all files that are neither weights nor written anew."""
    if source is None:
        return
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and file.name not in WRITTEN_ANEW:
            if file.name.startswith((".", "train_log")):
                continue
            shutil.copyfile(file, folder / file.name)


def _card(name: str, model: nn.Module) -> str:
    held = report(model)
    spec = next(iter(encoded_experts(model).values())).spec
    return CARD.format(
        name=name, budget=held.budget, lower=spec.k_min, sites=held.sites, k_max=spec.k_max, k_min=spec.k_min,
        group=spec.group_size,
    )  # fmt: skip


def load(folder: str | Path, budget: float | None = None, k_max: int | None = None, device: str = "cpu") -> nn.Module:
    """Load an encoded folder, ready to run, in the dtype it was saved with.

    budget: average planes per expert, the checkpoint's default if None (clamped, with a warning, to k_max). k_max: read
    only the first k_max planes; files of the others are not opened. Raises ValueError for anything missing, truncated,
    misnamed or misshaped, and for a budget or k_max that the checkpoint does not hold.
    """
    folder = Path(folder)
    settings, weight_map = checkpoint.read_index(folder, k_max)
    planes = k_max or settings["k_max"]
    spend = checkpoint.spend_of(settings)
    budget = warn_clamped(spend.budget, planes) if budget is None else budget
    check_budget(budget, spend.least(settings["k_min"]), planes)
    tensors = checkpoint.read_tensors(folder, weight_map)
    model = skeleton(folder)
    for fields in settings["sites"]:
        site = Site.from_dict(fields)
        parent, _, name = site.path.rpartition(".")
        setattr(model.get_submodule(parent), name, checkpoint.build_experts(site, settings, tensors, planes))
    _fill(model, tensors, folder)
    model = model.to(device).eval()
    finish(model, folder, settings, budget)
    return model


def finish(model: nn.Module, folder: Path, settings: dict, budget: float) -> None:
    """Make a model whose tensors were just read from `folder` ready: what it spends, where it came from, how it is saved."""
    for experts in encoded_experts(model).values():
        experts.hold(experts.gate_up_proj.weight, experts.down_proj.weight)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.dpamoe_source = _recorded_source(folder, settings)
    origin.remember(model, folder)
    keep_own_format(model)
    set_spend(model, **asdict(replace(checkpoint.spend_of(settings), budget=budget)))


def skeleton(folder: Path) -> nn.Module:
    """The model of a folder's config with parameters on the meta device and buffers in memory."""
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.from_pretrained(folder)
    name = str((config.architectures or [None])[0])
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f"{folder / 'config.json'} names architecture {name}, which transformers {transformers.__version__} lacks"
        )
    with init_empty_weights(include_buffers=False):
        model = architecture._from_config(config, dtype=config.dtype)
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put all tensors that are not experts where they belong; ValueError for one too many or one too few."""
    outcome = model.load_state_dict(tensors, strict=False, assign=True)
    if outcome.unexpected_keys:
        raise ValueError(f"{folder} holds tensors the model does not know: {', '.join(outcome.unexpected_keys[:4])}")
    model.tie_weights()
    missing = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model, such as {', '.join(missing[:4])}: convert again")


def refresh_residuals(folder: str | Path, original: nn.Module, calibration=None) -> dict[str, list[int]]:
    """Measure the residual tables of an encoded folder anew, on `original`, the model it was made from; returns unreached.

    What the allocator "threshold" needs is measured too. calibration: as for `transform`. The new tables replace the old ones
    in one step. Raises ValueError if the original does not have the sites of the folder.
    """
    folder = Path(folder)
    settings, weight_map = checkpoint.read_index(folder, without_residuals=True)
    sites = [Site.from_dict(fields) for fields in settings["sites"]]
    for site in sites:
        _check_same_site(original, site, folder)
    example = calibrate.example_batch(original, None)
    batches = list(calibrate.calibration_batches(original, calibration, example))
    samples = record(original, sites, batches, TOKENS_PER_EXPERT)
    tables, unreached = {}, {}
    for path, importance in sensitivity.measure(original, sites, batches).items():
        tables |= {f"{path}.{name}": tensor for name, tensor in vars(importance).items()}
    for site in track(sites, "profile", lambda site: site.path):
        own = {name: file for name, file in weight_map.items() if name.startswith(site.path + ".")}
        tensors = checkpoint.read_tensors(folder, own)
        tensors[f"{site.path}.residuals"] = torch.zeros(site.experts, settings["k_max"] + 1)
        encoded = checkpoint.build_experts(site, settings, tensors, settings["k_max"])
        weights = gather(original.get_submodule(site.path), site.layout, site.experts)
        up, down = encoded.gate_up_proj.weight, encoded.down_proj.weight
        _check_same_weights(weights, up, site.path, folder)
        table, missing = residual_table(weights, up, down, encoded.activation, samples.pop(site.path), encoded.post)
        tables[f"{site.path}.residuals"] = project(table, settings["k_min"])
        if missing:
            unreached[site.path] = missing
    write_residuals(folder, tables, unreached)
    return unreached


def write_residuals(folder: Path, tables: dict[str, Tensor], unreached: dict[str, list[int]]) -> None:
    """Replace the residual tables of an encoded folder, and the list of experts that calibration did not reach.

    tables: tensors by name, those of `checkpoint.IMPORTANCE` among them if they were measured. All of them are replaced in one
    step; the index only if there are others than before, and a crash in between needs another `dpamoe profile`. ValueError if
    a table does not have the shape of the folder's.
    """
    config = checkpoint.read_config(folder)
    settings, index = config["quantization_config"], read_json(folder / checkpoint.INDEX, checkpoint.AGAIN)
    for site in settings["sites"]:
        shape = tuple(tables[f"{site['path']}.residuals"].shape)
        if shape != (site["experts"], settings["k_max"] + 1):
            raise ValueError(f"the new residual tables do not have the shape of those in {folder}: convert the model again")
    file = folder / checkpoint.RESIDUALS
    partial = file.with_name(f"{file.name}.partial")
    save_file({name: table.contiguous() for name, table in tables.items()}, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    sync(partial)
    size = partial.stat().st_size
    partial.rename(file)
    if index["files"].get(file.name) != size:
        kept = {name: other for name, other in index["weight_map"].items() if other != file.name}
        index["weight_map"] = kept | dict.fromkeys(tables, file.name)
        index["files"][file.name] = size
        write_json(folder / checkpoint.INDEX, index)
    settings["unreached"] = unreached
    write_json(folder / "config.json", config)
    sync(folder)


def _check_same_site(model: nn.Module, site: Site, folder: Path) -> None:
    try:
        shape = gather(model.get_submodule(site.path), site.layout, site.experts).up.shape
    except (AttributeError, RuntimeError):
        shape = None
    if shape != (site.experts, site.up_rows, site.hidden):
        raise ValueError(f"the reference model has no experts like {site.path} of {folder}: give the model it was made from")


def _check_same_weights(weights: ExpertWeights, up: EncodedWeight, path: str, folder: Path) -> None:
    """ValueError if an encoded weight is far from the reference model's: shapes alone cannot tell two models apart."""
    error = float(weight_error(weights.up, up, 0)[-1])
    if not error <= OTHER_MODEL:
        raise ValueError(
            f"{path} of the reference model is not what {folder} was made from (relative squared error {error:.2g} at "
            f"{len(up.planes)} planes): give the original with --reference"
        )


def reference_of(folder: str | Path, wanted: str | None) -> Path:
    """The original model of an encoded folder: `wanted`, or the recorded source. ValueError if it is not there."""
    if wanted is not None:
        return Path(wanted)
    settings, _ = checkpoint.read_index(folder, without_residuals=True)
    path = _recorded_source(folder, settings)
    if path is None or not path.is_dir():
        recorded = settings.get("source") or "not recorded"
        raise ValueError(f"the original model of {folder} ({recorded}) was not found: give it with --reference")
    return path


def _recorded_source(folder: str | Path, settings: dict) -> Path | None:
    source = settings.get("source")
    return None if source is None else Path(os.path.normpath(Path(folder).absolute() / source))


def check_original(folder: str | Path) -> None:
    """Raise ValueError unless a folder has a config, plain weights, and files as long as their headers say."""
    method = (checkpoint.read_config(folder).get("quantization_config") or {}).get("quant_method")
    if method is not None:
        raise ValueError(f"{folder} is quantized with {method}: give the model with plain bf16, fp16 or fp32 weights")
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, (dtype, _) in checkpoint.check_header(file).items():
            if dtype.startswith(("F8", "F4", "F6")):
                raise ValueError(
                    f"{file} holds {name} as {dtype}, which means nothing without its scales: give the model with plain "
                    "bf16, fp16 or fp32 weights"
                )


def load_original(folder: str | Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    """Load an original Hugging Face model from a folder; ValueError if it is missing, truncated or lacks a tensor."""
    from transformers import AutoModelForCausalLM

    check_original(folder)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder} could not be loaded as a language model: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers only warns, and fills them with noise
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model, such as {missing[0]}: copy it again")
    if loading["unexpected_keys"]:
        names = sorted(loading["unexpected_keys"])
        logger.warning("%s holds %d tensors that the model does not use, such as %s", folder, len(names), names[0])
    return model.eval()
