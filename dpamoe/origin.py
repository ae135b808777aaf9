"""Which encoded folder a model in memory came from, so that planes which were dropped can be read again."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dpamoe import checkpoint
from dpamoe.modules import EncodedExperts


@dataclass(frozen=True)
class Origin:
    """An encoded folder, and the digest of its index when the model was read from it or written to it."""

    folder: Path
    digest: str


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / checkpoint.INDEX).read_bytes()).hexdigest()


def remember(model: nn.Module, folder: Path) -> None:
    """Note that the planes of `model` are those of `folder`."""
    folder = Path(folder).absolute()
    model.dpamoe_origin = Origin(folder, _digest(folder))


def read_planes(model: nn.Module, held: dict[str, EncodedExperts], first: int, last: int) -> dict[str, Tensor]:
    """Planes `first` to `last` - 1 of all sites, with their scales, from the folder that a model came from.

    Raises ValueError if the model came from no folder, or the folder is gone, changed or damaged.
    """
    origin = getattr(model, "dpamoe_origin", None)
    if origin is None:
        raise ValueError(
            f"planes {first} to {last - 1} were dropped and the model came from no folder to read them from: transform the "
            "original again, or save the model before dropping planes"
        )
    folder = origin.folder
    if not (folder / checkpoint.INDEX).is_file():
        raise ValueError(
            f"{folder}, which holds planes {first} to {last - 1} of this model, is gone: put it back, or load again"
        )
    changed = f"{folder} is no longer the checkpoint that this model came from: load the model again"
    if _digest(folder) != origin.digest:
        raise ValueError(changed)
    _, weight_map = checkpoint.read_index(folder, last, without_residuals=True)
    paths = [experts.site.path for experts in held.values()]
    for site in {paths[0], paths[-1]}:
        _check_same_plane(folder, weight_map, next(e for e in held.values() if e.site.path == site), changed)
    wanted = {
        f"{path}.{weight}.{kind}.{plane}"
        for path in paths
        for weight in ("gate_up_proj", "down_proj")
        for kind in ("plane", "scale")
        for plane in range(first, last)
    }
    return checkpoint.read_tensors(folder, {name: file for name, file in weight_map.items() if name in wanted})


def _check_same_plane(folder: Path, weight_map: dict[str, str], experts: EncodedExperts, message: str) -> None:
    """Sizes in the index do not tell two conversions apart; one plane that is still held does."""
    name = f"{experts.site.path}.down_proj.plane.0"
    plane = experts.down_proj.plane.as_list()[0]
    if not torch.equal(checkpoint.read_tensors(folder, {name: weight_map[name]})[name], plane.cpu()):
        raise ValueError(message)
