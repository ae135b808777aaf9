"""What of a model fits into a memory: planes, cache and working space, before anything is loaded."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dpamoe import calibration, checkpoint, storage
from dpamoe.cache_size import CacheSize, cache_size
from dpamoe.overhead import storage_overhead
from dpamoe.passes import weightless
from dpamoe.sites import Site, read_stack
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.threshold import BINS

WORKING = 512 << 20  # a device's context, its libraries, what the allocator cannot use
HIDDEN_STATES = 8  # tensors as wide as the hidden state that a layer holds at once
NUMBER = 2  # bytes of a number in them
RESIDUAL = 4
PER_PLANE = re.compile(r"\.(gate_up_proj|down_proj)\.(plane|scale)\.\d+$")


@dataclass(frozen=True)
class SiteCost:
    """Bytes of one site: what each plane adds with its scales, and offsets (tied: and scales), which every k reads."""

    experts: int
    top_k: int
    plane: float
    fixed: float
    weights: int

    def per_token(self, planes: float) -> float:
        """Bytes of expert weights that one token reads at `planes` planes each."""
        return self.top_k * (planes * self.plane + self.fixed) / self.experts


@dataclass(frozen=True)
class Costs:
    """What a model costs: sites; other bytes in memory, and of these what a token reads; its cache; widest layer's working set.

    working: bytes for each token of a prompt. spend: how it spends by default.
    """

    encoded: bool
    spec: EncodeSpec
    spend: SpendSpec
    sites: tuple[SiteCost, ...]
    others: int
    others_read: int
    cache: CacheSize
    working: int


def costs_of(folder: str | Path, spec: EncodeSpec, spend: SpendSpec | None = None) -> Costs:
    """Costs of an encoded folder, or of an original one as if encoded with `spec`; reads its config and headers alone.

    spend: how the original is to spend; thresholds need tables of their own.

    Raises ValueError for a folder that is no model, is damaged, or has no routed experts.
    """
    folder = Path(folder)
    return _encoded(folder) if checkpoint.is_encoded(folder) else _original(folder, spec, spend or SpendSpec())


def _encoded(folder: Path) -> Costs:
    settings, weight_map = checkpoint.read_index(folder)
    sizes = checkpoint.tensor_bytes(folder, sorted(set(weight_map.values())))
    spec = checkpoint.spec_of(settings)
    sites = [Site.from_dict(fields) for fields in settings["sites"]]
    kept = checkpoint.expected_tensors(settings)
    costs = []
    for site in sites:
        own = {name: size for name, size in sizes.items() if name in kept and name.startswith(f"{site.path}.")}
        planes = sum(size for name, size in own.items() if PER_PLANE.search(name)) / spec.k_max
        fixed = sum(size for name, size in own.items() if not PER_PLANE.search(name) and not name.endswith(".residuals"))
        costs.append(SiteCost(site.experts, site.top_k, planes, fixed, site.weights))
    weights = sum(site.plane * spec.k_max + site.fixed for site in costs)
    model = storage.skeleton(folder)
    model.tie_weights()
    unsaved = sum(_bytes(buffer) for name, buffer in model.named_buffers() if name not in sizes)
    others = round(sum(sizes.values()) - weights) + unsaved
    working = _working(model, [(site.top_k, site.inner, site.out) for site in sites])
    read = others - _unread(model)
    return Costs(True, spec, checkpoint.spend_of(settings), tuple(costs), others, read, cache_size(model), working)


def _original(folder: Path, spec: EncodeSpec, spend: SpendSpec) -> Costs:
    model = storage.skeleton(folder)
    model.tie_weights()
    sketches = weightless.sketch_sites(model, *calibration.example_batch(model, None))
    found = [sketch for sketch in sketches if not sketch.reason]
    if not found:
        reasons = "; ".join(f"{sketch.path}: {sketch.reason}" for sketch in sketches[:3])
        raise ValueError(f"no routed experts were found in {folder}: " + (reasons or "it looks dense"))
    replaced = {
        f"{sketch.path}.{name}"
        for sketch in found
        for stack in (*sketch.layout.ups, sketch.layout.down)
        for name in stack.names
    }
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weighed = spend.allocator == "threshold"
    numbers = spec.k_max + 1 + (BINS if weighed else 0)
    tables = sum(RESIDUAL * (sketch.experts * numbers + weighed) for sketch in found)
    others = sum(_bytes(tensor) for name, tensor in tensors if name not in replaced) + tables
    working = _working(model, [(sketch.top_k, sketch.inner, sketch.out) for sketch in found])
    sites = tuple(_as_encoded(model.get_submodule(sketch.path), sketch, spec) for sketch in found)
    return Costs(False, spec, spend, sites, others, others - _unread(model), cache_size(model), working)


def _as_encoded(module: nn.Module, sketch: weightless.Sketch, spec: EncodeSpec) -> SiteCost:
    """A site's costs once encoded, scales in fp16."""
    rows = sum(read_stack(module, stack, sketch.experts).shape[1] for stack in sketch.layout.ups)
    shape = {name: getattr(sketch, name) for name in ("path", "experts", "top_k", "hidden", "inner", "out")}
    rest = {"activation": "", "layout": sketch.layout, "parameters": 0, "dtype": sketch.dtype}
    site = Site(**shape, **rest, up_rows=rows)
    one = storage_overhead(site, spec)
    scales = one["scale_bytes_shared"] if spec.scale_mode == "shared" else 0
    plane = (one["plane_bytes"] + scales) / spec.k_max
    fixed = one["bytes_shared"] - plane * spec.k_max
    return SiteCost(site.experts, site.top_k, site.experts * plane, site.experts * fixed, site.weights)


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unread(model: nn.Module) -> int:
    """Bytes of the input embedding, of which a token reads one row; none if the head shares it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        return 0
    return _bytes(embedding.weight)


def _working(model: nn.Module, sites: list[tuple[int, int, int]]) -> int:
    """Bytes for each token of a prompt: hidden states, and inputs and outputs of the experts of one layer."""
    hidden = model.config.get_text_config().hidden_size
    return NUMBER * (HIDDEN_STATES * hidden + max(top_k * (inner + out) for top_k, inner, out in sites))


def plan(costs: Costs, memory: int, context: int, batch: int = 1, margin: int | None = None) -> dict:
    """Which k_max and budget fit into `memory` bytes with a cache for `batch` sequences of `context` tokens.

    margin: bytes to leave free beside weights and cache; None: 512 MiB and what a prompt of that length works with.
    Returns memory, context, batch, other_bytes, cache_bytes, cache_exact, margin_bytes; least, the smallest budget; rows for
    each k of weight_bytes, total_bytes, fits, bits_per_weight and expert_bytes_per_token (at k planes each); k_max and budget,
    None if nothing fits; expert_bytes_per_token and other_bytes_per_token at that budget. Raises ValueError for numbers below
    1.
    """
    if min(memory, context, batch) < 1 or (margin is not None and margin < 0):
        raise ValueError(f"memory {memory}, context {context} and batch {batch} must be 1 or more: give sizes of your machine")
    cache = batch * costs.cache.bytes(context)
    working = WORKING + batch * context * costs.working if margin is None else margin
    rows, weights = [], sum(site.weights for site in costs.sites)
    for k in range(costs.spec.k_min, costs.spec.k_max + 1):
        experts = sum(k * site.plane + site.fixed for site in costs.sites)
        held = costs.others + experts
        total = math.ceil(held + cache + working)
        rows.append({
            "k": k, "weight_bytes": round(held), "total_bytes": total, "fits": total <= memory,
            "bits_per_weight": 8 * experts / weights, "expert_bytes_per_token": round(_read(costs, k)),
        })  # fmt: skip
    k_max = max((row["k"] for row in rows if row["fits"]), default=None)
    budget = None if k_max is None else float(min(costs.spend.budget, k_max))
    return {
        "encoded": costs.encoded, "memory": memory, "context": context, "batch": batch, "other_bytes": costs.others,
        "cache_bytes": cache, "cache_exact": costs.cache.exact, "margin_bytes": working, "rows": rows,
        "least": costs.spend.least(costs.spec.k_min), "k_max": k_max, "budget": budget,
        "expert_bytes_per_token": None if budget is None else round(_read(costs, budget)),
        "other_bytes_per_token": costs.others_read + cache // batch,
    }  # fmt: skip


def _read(costs: Costs, planes: float) -> float:
    return sum(site.per_token(planes) for site in costs.sites)
