"""The quantization method "dpamoe" of transformers, by which `AutoModelForCausalLM.from_pretrained` opens an encoded folder.

`import dpamoe` imports this file as soon as transformers' quantizers are imported. transformers finds no weights in an encoded
folder by itself. Here it is led to one small file of it first; before weights are read, the experts are swapped and the list
of files becomes what the wanted planes need.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_files
from transformers.utils.quantization_config import QuantizationConfigMixin

from dpamoe import checkpoint, storage
from dpamoe.api import warn_clamped
from dpamoe.files import read_json
from dpamoe.modules import encoded_experts
from dpamoe.sites import Site
from dpamoe.spec import check_budget

logger = logging.getLogger("dpamoe")
METHOD = "dpamoe"
DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
}  # fmt: skip


class DpamoeConfig(QuantizationConfigMixin):
    """`config.quantization_config` of an encoded folder; `k_max` and `default_budget` may be lowered before loading."""

    def __init__(self, **fields):
        self.__dict__.update({**fields, "quant_method": METHOD})

    def get(self, name: str, default=None):
        """A field as a dictionary gives it: callers meet both kinds."""
        return getattr(self, name, default)


class DpamoeQuantizer(HfQuantizer):
    """Builds encoded experts where transformers would load plain ones; a checkpoint is encoded before, never while loading."""

    requires_calibration = True

    def validate_environment(self, *args, device_map=None, **rest) -> None:
        """Say what accelerate leaves where it should not be, unless it is told otherwise."""
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            logger.warning("layers are offloaded: encoded experts go with them only with offload_buffers=True")

    def update_attn_implementation(self, config):
        """The one hook, from transformers 5.18 on, that sees the config before weight files are looked for."""
        config.transformers_weights = checkpoint.RESIDUALS
        return config

    def update_ep_plan(self, config):
        """The same before 5.21."""
        return self.update_attn_implementation(config)

    def update_parallel_plan(self, model, plan) -> None:
        """Encoded tensors are in no plan."""

    def update_weight_conversions(self, weight_conversions, *rest) -> list:
        """None: the files hold the names that the model has."""
        return []

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **rest):
        self.folder = Path(checkpoint_files[0]).parent
        wanted = self.quantization_config.get("k_max")
        _bring_files(self.folder, model.config, wanted)
        self.settings, weight_map = checkpoint.read_index(self.folder, wanted)
        self.planes = wanted or self.settings["k_max"]
        default = self.quantization_config.get("default_budget", self.settings["default_budget"])
        least = checkpoint.spend_of(self.settings).least(self.settings["k_min"])
        self.budget = check_budget(warn_clamped(default, self.planes), least, self.planes)
        tensors = _on_meta(self.folder, weight_map)
        _check_complete(model, self.settings, tensors.keys(), self.folder)
        for fields in self.settings["sites"]:
            _swap(model, Site.from_dict(fields), self.settings, tensors, self.planes)
        files = sorted(set(weight_map.values()), key=lambda name: (name == checkpoint.RESIDUALS, name))
        checkpoint_files[:] = [str(self.folder / name) for name in files]  # the list that transformers reads from next

    def _process_model_after_weight_loading(self, model, **rest):
        vars(model.config).pop("transformers_weights", None)
        for experts in encoded_experts(model).values():
            experts.spent.zero_()
            experts.skipped.zero_()
        storage.finish(model, self.folder, self.settings, self.budget)
        return model

    def is_serializable(self) -> bool:
        """Not by transformers' own writer; see `own_format`."""
        return False

    @property
    def is_trainable(self) -> bool:
        """There is no gradient through encoded experts."""
        return False

    @property
    def is_compileable(self) -> bool:
        """`generate` with a static cache may compile the model."""
        return True


def _bring_files(folder: Path, config, k_max: int | None) -> None:
    """Of a repository on the hub, download the files that `k_max` planes need and that its snapshot folder lacks."""
    if Path(config.name_or_path).is_dir():
        return

    def bring(names: list[str]) -> None:
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            cached_files(
                config.name_or_path, missing, revision=getattr(config, "_commit_hash", None), cache_dir=_cache_of(folder)
            )

    bring([checkpoint.INDEX, "config.json"])
    names = read_json(folder / checkpoint.INDEX, checkpoint.AGAIN)["files"]
    number = re.compile(r"model-plane-(\d+)-")
    bring([name for name in names if not (k_max and (found := number.match(name)) and int(found[1]) >= k_max)])


def _cache_of(folder: Path) -> str:
    """The cache that a snapshot folder lies in: CACHE/models--ORG--NAME/snapshots/REVISION."""
    return str(folder.parents[2])


def _on_meta(folder: Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    """Every tensor of these files without its numbers."""
    tensors = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118  a handle is no dictionary
                part = handle.get_slice(name)
                tensors[name] = torch.empty(part.get_shape(), dtype=DTYPES.get(part.get_dtype()), device="meta")
    return tensors


def _swap(model: nn.Module, site: Site, settings: dict, tensors: dict[str, Tensor], planes: int) -> None:
    """Put a site's experts into the model, on the meta device; a model without head has paths without its prefix."""
    with torch.device("meta"):
        experts = checkpoint.build_experts(site, settings, tensors, planes)
    experts.table, experts.uniform_table = torch.empty_like(experts.residuals), torch.empty_like(experts.residuals)
    path, prefix = site.path, model.base_model_prefix + "."
    if path.startswith(prefix) and not hasattr(model, model.base_model_prefix):
        path = path.removeprefix(prefix)
        experts.site = replace(site, path=path)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, experts)


def _check_complete(model: nn.Module, settings: dict, names, folder: Path) -> None:
    """ValueError if the folder lacks a tensor that is not an expert's: transformers would warn, and make it up."""
    if type(model).__name__ not in (model.config.architectures or []):
        return  # another head than the saved one: transformers says what is new
    sites = tuple(fields["path"] + "." for fields in settings["sites"])
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for name in model.state_dict()
        if name not in names
        and name not in tied
        and not name.startswith(sites)
        and not any(re.search(p, name) for p in ignored)
    ]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model, such as {', '.join(missing[:4])}: convert again")


def register() -> None:
    """Make transformers know the method; a second time changes nothing."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(DpamoeConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(DpamoeQuantizer)


register()
