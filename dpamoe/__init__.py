"""Any-precision experts for Mixture-of-Experts models: one checkpoint, every operating point."""

from dpamoe.api import budget, report, revert, set_budget, set_spend, stats, transform
from dpamoe.on_import import when_imported
from dpamoe.resize import resize
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.storage import load, save

__version__ = "0.1.0"
__all__ = [
    "EncodeSpec", "SpendSpec", "budget", "load", "report", "resize", "revert", "save", "set_budget", "set_spend",
    "stats", "transform",
]  # fmt: skip

when_imported("transformers.quantizers.auto", "dpamoe.hf")
