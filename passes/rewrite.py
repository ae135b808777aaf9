"""Put encoded experts in the place of a site's module, and take them out again."""

from collections.abc import Mapping

from torch import nn

from dpamoe.modules import EncodedExperts
from dpamoe.passes.function import OriginalExperts
from dpamoe.sites import Site


def install(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Put modules at their paths, such as the graphs of blocks, which hold the original experts until they are replaced."""
    for path, block in blocks.items():
        parent, name = _parent(model, path)
        setattr(parent, name, block)


def source_of(model: nn.Module, site: Site) -> nn.Module:
    """The module with a site's float weights, whether or not its block is a graph by now."""
    experts = model.get_submodule(site.place if hasattr(model.get_submodule(site.path), site.block) else site.path)
    return experts.source if isinstance(experts, OriginalExperts) else experts


def replace(model: nn.Module, encoded: EncodedExperts, keep_original: bool) -> None:
    """Swap the module at the site's place for its encoded form; the original is kept on it only if asked."""
    parent, name = _parent(model, encoded.site.place)
    held = getattr(parent, name)
    original = held.source if encoded.site.block else held
    encoded.original = [original] if keep_original else []
    encoded.train(held.training)
    setattr(parent, name, encoded)


def restore(model: nn.Module, path: str) -> None:
    """Put the kept original of the encoded experts at `path` back. Raises ValueError if it was not kept."""
    parent, name = _parent(model, path)
    encoded = getattr(parent, name)
    if not encoded.original:
        raise ValueError(
            f"the original experts of {path} were not kept: transform with keep_original=True, or load the model again"
        )
    if encoded.site.block:
        parent, name = _parent(model, encoded.site.path)
    setattr(parent, name, encoded.original[0].train(encoded.training))


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    before, _, name = path.rpartition(".")
    return model.get_submodule(before), name
