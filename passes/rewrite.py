"""Put encoded experts in the place of a site's module, and take them out again."""

from torch import nn

from dpamoe.modules import EncodedExperts


def replace(model: nn.Module, encoded: EncodedExperts, keep_original: bool) -> None:
    """Swap the module at the site's path for its encoded form; the original is kept on it only if asked."""
    parent, name = _parent(model, encoded.site.path)
    original = getattr(parent, name)
    encoded.original = [original] if keep_original else []
    encoded.train(original.training)
    setattr(parent, name, encoded)


def restore(model: nn.Module, path: str) -> None:
    """Put the kept original back. Raises ValueError if it was not kept."""
    parent, name = _parent(model, path)
    encoded = getattr(parent, name)
    if not encoded.original:
        raise ValueError(
            f"the original experts of {path} were not kept: transform with keep_original=True, or load the model again"
        )
    setattr(parent, name, encoded.original[0].train(encoded.training))


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    before, _, name = path.rpartition(".")
    return model.get_submodule(before), name
