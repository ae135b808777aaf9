"""A model of a source folder without its weights, its routed experts, and the layers that hold them."""

import fnmatch
import math
from dataclasses import dataclass, field

from torch import nn

from dpamoe import calibration as calibrate
from dpamoe.mapping import Mapping, make_mapping
from dpamoe.passes import weightless
from dpamoe.source import Source

IN_MEMORY = "dpamoe.transform may encode them in memory, as graphs, which no folder can hold yet"


@dataclass(frozen=True)
class Outline:
    """What is known before any weight is read.

    sketches: routed experts that are to be encoded; refused: experts that cannot be, with the reason, and ignored ones.
    layers: paths of the modules that are in memory one at a time. experts: how many were seen in all.
    """

    source: Source
    model: nn.Module
    mapping: Mapping
    sketches: list[weightless.Sketch]
    layers: list[str]
    refused: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    experts: int = 0

    @property
    def rest(self) -> list[str]:
        """Names of the tensors outside of all layers."""
        inside = tuple(f"{path}." for path in self.layers)
        return [name for name in self.mapping.wanted if not name.startswith(inside)]

    def bytes_of(self, names: list[str]) -> int:
        """Memory that these tensors take."""
        return sum(self.numbers_of(name) * self.mapping.wanted[name][1].itemsize for name in names)

    def numbers_of(self, name: str) -> int:
        """How many numbers a tensor holds."""
        return math.prod(self.mapping.wanted[name][0])


def outline(source: Source, ignore: tuple[str, ...] = ()) -> Outline:
    """Build the model of a source on the meta device and find its experts.

    ignore: patterns of site paths, as of a shell, to leave alone. Raises ValueError if there are no routed experts, none are
    left, a pattern fits none, or the files do not have the tensors that the config asks for.
    """
    model = on_meta(source)
    mapping = make_mapping(model, source)
    sketches = weightless.sketch_sites(model, *calibrate.example_batch(model, None))
    refused = {sketch.path: sketch.reason for sketch in sketches if sketch.reason}
    found = [sketch for sketch in sketches if not sketch.reason]
    if not found:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(refused.items())[:3])
        raise ValueError(
            f"no routed experts that can be encoded were found in {source.folder}"
            + (
                f" ({reasons}): {IN_MEMORY}"
                if reasons
                else ": it looks dense, and only Mixture-of-Experts models can be converted"
            )
        )
    kept, ignored = _without_ignored(found, ignore)
    _check_extra(mapping, found, source)
    layers = layers_of(model, [sketch.path for sketch in found])
    return Outline(source, model, mapping, kept, layers, refused, ignored, sum(sketch.experts for sketch in sketches))


def on_meta(source: Source) -> nn.Module:
    """The model of a source's config with parameters on the meta device and buffers in memory."""
    import transformers
    from accelerate import init_empty_weights

    name, kind = str((source.config.get("architectures") or [None])[0]), source.config.get("model_type")
    architecture = getattr(transformers, name, None)
    if architecture is None or kind not in transformers.CONFIG_MAPPING:
        lacking = f"architecture {name}" if architecture is None else f"model type {kind}"
        raise ValueError(
            f"{source.folder / 'config.json'} names {lacking}, which transformers {transformers.__version__} lacks: models "
            "with code of their own are transformed in memory (dpamoe.transform)"
        )
    config = transformers.AutoConfig.from_pretrained(source.folder, trust_remote_code=False)  # ask nobody
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are read as plain ones
    with init_empty_weights(include_buffers=False):
        model = architecture._from_config(config, dtype=source.dtype())
    model.config.dtype = source.dtype()
    model.name_or_path = str(source.folder)
    if (source.folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(source.folder)
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def _without_ignored(found: list, ignore: tuple[str, ...]) -> tuple[list, tuple[str, ...]]:
    paths = [sketch.path for sketch in found]
    for pattern in ignore:
        if not fnmatch.filter(paths, pattern):
            raise ValueError(
                f"--ignore {pattern} fits none of the {len(paths)} routed experts: they are called like {paths[0]}, and * "
                "stands for any letters"
            )
    ignored = tuple(path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in ignore))
    if len(ignored) == len(paths):
        raise ValueError(f"--ignore leaves none of the {len(paths)} routed experts: ignore fewer")
    return [sketch for sketch in found if sketch.path not in ignored], ignored


def _check_extra(mapping: Mapping, found: list, source: Source) -> None:
    """ValueError for a file tensor that looks like one of experts and has no place in the model."""

    def shape_of(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in name.split("."))

    known: set[str] = set()
    for sketch in found:
        for name in mapping.below(sketch.path):
            known |= {shape_of(key) for keys in mapping.recipes[name].sources.values() for key in keys}
    wrong = [name for name in mapping.extra if shape_of(name) in known]
    if wrong:
        raise ValueError(
            f"{source.tensors[wrong[0]].entries[0].file} holds {wrong[0]}, an expert weight that the model of its config does "
            f"not have ({len(wrong)} such): its config.json belongs to another model, download both again"
        )


def layers_of(model: nn.Module, paths: list[str]) -> list[str]:
    """The elements of the outermost lists of modules around these paths, in order; the parent where there is no list."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        outer = next((other for other in above if isinstance(model.get_submodule(other), nn.ModuleList)), None)
        if outer is None:
            found[above[-1] if above else path] = None
        else:
            found.update(dict.fromkeys(f"{outer}.{name}" for name, _ in model.get_submodule(outer).named_children()))
    return list(found)
