"""Settings that go together under a name: how to encode, and how the model then spends its planes."""

from dataclasses import dataclass, replace

from dpamoe.spec import EncodeSpec, SpendSpec


@dataclass(frozen=True)
class Preset:
    """One choice of both settings; the budget in `spend` is the one that a checkpoint has if nobody names another."""

    encode: EncodeSpec
    spend: SpendSpec


DEFAULT = "paper"
PRESETS = {
    "paper": Preset(EncodeSpec(), SpendSpec()),  # groups of 128, a scale for every plane, the budget kept by every token
    "quality": Preset(
        EncodeSpec(group_size=32, scale_mode="tied"), SpendSpec(allocator="threshold", skip=True)
    ),  # the least error at the same bytes; the budget is kept on average
}


def name_of(encode: EncodeSpec, spend: SpendSpec) -> str | None:
    """The preset with these settings, whatever the budget; None if there is none."""
    for name, preset in PRESETS.items():
        if (encode, replace(spend, budget=preset.spend.budget)) == (preset.encode, preset.spend):
            return name
    return None


def preset_of(name: str) -> Preset:
    """The preset of a name; ValueError, with all names, for any other."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}: use {' or '.join(PRESETS)}")
    return PRESETS[name]
