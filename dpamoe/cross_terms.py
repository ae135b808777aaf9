"""How much of a layer's true error cross terms between experts make, which the allocator leaves out (DPA-MoE, appendix B).

With e_a = f_a(x) - f_a^(k)(x), the output error of a token's expert a at k planes, and g_a its gate, the allocator minimises
D = sum over a of g_a^2 |e_a|^2, while the layer's squared error is E = |sum over a of g_a e_a|^2.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpamoe import api, program
from dpamoe.kernels.grouped import prefixes
from dpamoe.modes import evaluating
from dpamoe.modules import EncodedExperts, encoded_experts
from dpamoe.profile import weight_error
from dpamoe.progress import track
from dpamoe.sites import ExpertWeights, Site, chosen, gather
from dpamoe.storage import OTHER_MODEL

TOKENS = 2048  # of each layer
Routed = tuple[Tensor, Tensor, Tensor]  # hidden [T, H], index [T, A], gates [T, A]


def cross_terms(
    original: nn.Module, encoded: nn.Module, batches: Iterable[tuple[tuple, dict]], tokens: int = TOKENS
) -> list[dict]:
    """What cross terms make of the error with all experts at k planes: one row for every k held, and a last one, whose k is
    None, over the layers' errors at all k together. Arguments as in `measure`.

    signed: sum of E - D over all tokens of all layers, divided by the sum of E: the share of the true error that cross terms
    make, negative where they cancel error. share: its size. share_max: the largest share of one layer. absolute: sum of
    |E - D| over the sum of E, where tokens cannot cancel each other. spearman, pearson: correlation of E and D over the tokens
    of one layer, mean over layers; _min: the least of them; _pooled: over the tokens of all layers at once. None where E or D
    is constant. tokens: measured in each layer, at least.
    """
    layers = list(measure(original, encoded, batches, tokens).values())
    counts = _counts(next(iter(encoded_experts(encoded).values())))
    rows = [_row(k, [(true[number], diagonal[number]) for true, diagonal in layers]) for number, k in enumerate(counts)]
    together = _row(None, [(true.flatten(), diagonal.flatten()) for true, diagonal in layers])
    return [*rows, {**together, "tokens": rows[0]["tokens"]}]


def measure(
    original: nn.Module, encoded: nn.Module, batches: Iterable[tuple[tuple, dict]], tokens: int = TOKENS
) -> dict[str, tuple[Tensor, Tensor]]:
    """E and D of every token with all experts at k planes: by place of the experts, fp64 [K, T] each, k rising to all held.

    original, encoded: the same model as it was and transformed. batches: (args, kwargs), as `calibration_batches` gives. Each
    layer is measured on the first `tokens` tokens that reach it, so that the errors of one layer are in memory at a time.
    Layers see what the original gives them; only where a block holds no module for its experts, what the encoded model gives.
    Raises ValueError unless the two are one model, the second one encoded, and tokens reach every layer.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: measure 1 or more of each layer, better {TOKENS}")
    if encoded_experts(original):
        raise ValueError("the original model is encoded already: load the model it was made from")
    held = encoded_experts(encoded)
    if not held:
        raise ValueError(f"{type(encoded).__name__} holds no encoded experts: call dpamoe.transform or dpamoe.load first")
    weights = {place: _weights_of(original, experts) for place, experts in held.items()}
    inputs = _inputs(original, encoded, batches, tokens)
    return {
        place: true_and_diagonal(experts, weights.pop(place), *inputs.pop(place))
        for place, experts in track(held.items(), "cross terms", lambda item: item[0])
    }


def _counts(experts: EncodedExperts) -> range:
    return range(experts.spec.k_min, len(experts.gate_up_proj.weight.planes) + 1)


def _weights_of(original: nn.Module, experts: EncodedExperts) -> ExpertWeights:
    """The original weights of encoded experts; ValueError if the original has none like them."""
    site = experts.site
    try:
        weights = gather(original.get_submodule(site.path), site.layout, site.experts)
    except (AttributeError, RuntimeError):
        weights = None
    if weights is None or weights.up.shape != (site.experts, site.up_rows, site.hidden):
        raise ValueError(f"the original model has no experts like {site.path}: give the model that was encoded")
    device = experts.residuals.device
    error = float(weight_error(weights.up[:1].to(device), experts.gate_up_proj.weight, 0)[-1])
    if not error <= OTHER_MODEL:
        raise ValueError(
            f"{site.path} of the original model is not what was encoded (relative squared error {error:.2g}, at most "
            f"{OTHER_MODEL} is allowed): give the model that was encoded"
        )
    return weights


def _inputs(original: nn.Module, encoded: nn.Module, batches: Iterable, tokens: int) -> dict[str, Routed]:
    """What reaches each site, by its place, on the device of the encoded experts."""
    held = encoded_experts(encoded)
    alone = [experts.site for experts in held.values() if not experts.site.block]
    inside = [experts.site for experts in held.values() if experts.site.block]
    batches = list(batches) if alone and inside else batches
    found = record_routed(original, alone, batches, tokens) if alone else {}
    if inside:
        with api.spending_kept(encoded):
            api.set_budget(encoded, float(_counts(held[inside[0].place])[-1]))
            found |= record_routed(encoded, inside, batches, tokens)
    for place, experts in held.items():
        if not found[place][0].shape[0]:
            raise ValueError(f"no token reached {place}: give batches that run through every layer")
        found[place] = tuple(part.to(experts.residuals.device) for part in found[place])
    return found


def record_routed(model: nn.Module, sites: list[Site], batches: Iterable, tokens: int) -> dict[str, Routed]:
    """Run batches until `tokens` tokens reached every site; hidden [T, H], index [T, A] and gates [T, A] by place."""
    parts: dict[str, list[Routed]] = {site.place: [] for site in sites}
    hooks = [model.get_submodule(site.place).register_forward_pre_hook(_keep(parts[site.place], site)) for site in sites]
    try:
        with evaluating(model), torch.no_grad():
            for args, kwargs in batches:
                model(*args, **kwargs)
                if all(sum(part[0].shape[0] for part in own) >= tokens for own in parts.values()):
                    break
    finally:
        for hook in hooks:
            hook.remove()
    empty = (torch.empty(0),) * 3
    return {
        place: tuple(torch.cat(kind)[:tokens] for kind in zip(*(own or [empty]), strict=True)) for place, own in parts.items()
    }


def _keep(parts: list[Routed], site: Site):
    def keep(module, args):
        hidden, index, gates = args
        index = chosen(index) if site.masked else index
        parts.append((hidden.detach().flatten(0, -2).clone(), index.clone(), gates.detach().view(index.shape).clone()))

    return keep


def true_and_diagonal(
    experts: EncodedExperts, weights: ExpertWeights, hidden: Tensor, index: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """E and D of every token with all its experts at k planes, fp64 [K, T] each, k rising; shapes as in `Routed`.

    Where the gate weighs an expert's input, e_a = f_a(g_a x) - f_a^(k)(g_a x) and no gate stands before it. A token with an
    output that is not finite is left out.
    """
    counts = _counts(experts)
    total = torch.zeros(len(counts), hidden.shape[0], experts.site.out, device=hidden.device)
    diagonal = torch.zeros(total.shape[:2], dtype=torch.float64, device=hidden.device)
    for expert in range(experts.site.experts):
        token, slot = (index == expert).nonzero(as_tuple=True)
        if token.numel():
            rows, own = hidden[token].float(), gates[token, slot, None].float()
            rows, own = (rows * own, torch.ones_like(own)) if experts.site.weigh_input else (rows, own)
            for number, error in enumerate(output_errors(experts, weights, expert, rows)):
                total[number].index_add_(0, token, own * error)
                diagonal[number].index_add_(0, token, (own * error).double().square().sum(1))
    true = torch.stack([errors.double().square().sum(1) for errors in total])
    finite = (torch.isfinite(true) & torch.isfinite(diagonal)).all(0)
    return true[:, finite].cpu(), diagonal[:, finite].cpu()


def output_errors(experts: EncodedExperts, weights: ExpertWeights, expert: int, rows: Tensor) -> Iterator[Tensor]:
    """Yield f(x) - f^(k)(x) of one expert over rows [n, H], fp32 [n, O], for every k held, rising."""
    biases = [None if bias is None else bias[expert].to(rows) for bias in (weights.up_bias, weights.down_bias)]

    def run(up: Tensor, down: Tensor) -> Tensor:
        result = F.linear(program.run(experts.activation, F.linear(rows, up, biases[0]), expert), down, biases[1])
        return result if experts.post is None else program.run(experts.post, result, expert)

    exact, counts = run(weights.up[expert].to(rows), weights.down[expert].to(rows)), list(_counts(experts))
    encoded = [prefixes(part.weight, expert, counts) for part in (experts.gate_up_proj, experts.down_proj)]
    for up, down in zip(*encoded, strict=True):
        yield exact - run(up, down)


def _row(k: int | None, layers: list[tuple[Tensor, Tensor]]) -> dict:
    """One row of `cross_terms` from E and D, fp64 [T] each, of every layer."""
    whole = sum(float(true.sum()) for true, _ in layers)
    cross = [float((true - diagonal).sum()) for true, diagonal in layers]
    sizes = sum(float((true - diagonal).abs().sum()) for true, diagonal in layers)
    shares = [_ratio(abs(own), float(true.sum())) for own, (true, _) in zip(cross, layers, strict=True)]
    pooled = [torch.cat(parts) for parts in zip(*layers, strict=True)]
    correlations = {}
    for name, correlation in (("spearman", spearman), ("pearson", pearson)):
        own = [found for found in (correlation(*layer) for layer in layers) if found is not None]
        correlations[name] = sum(own) / len(own) if own else None
        correlations |= {f"{name}_min": min(own, default=None), f"{name}_pooled": correlation(*pooled)}
    return {
        "k": k,
        "share": _ratio(abs(sum(cross)), whole),
        "signed": _ratio(sum(cross), whole),
        "share_max": max(shares),
        "absolute": _ratio(sizes, whole),
        **correlations,
        "tokens": min(true.numel() for true, _ in layers),
        "layers": len(layers),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (float("inf") if part else 0.0)


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1 on, equal values sharing the mean of theirs: fp64, shape of `values` [N]."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[place]


def pearson(left: Tensor, right: Tensor) -> float | None:
    """Linear correlation of two vectors [N]; None where one of them is constant."""
    if bool((left == left[:1]).all()) or bool((right == right[:1]).all()):
        return None
    return float(torch.corrcoef(torch.stack([left.double(), right.double()]))[0, 1])


def spearman(left: Tensor, right: Tensor) -> float | None:
    """Rank correlation of two vectors [N], ties averaged; None where one of them is constant."""
    return pearson(ranks(left), ranks(right))
