"""Residual profile: how much error each expert makes at each number of planes, measured on calibration tokens.

R[e, k] = mean over tokens of |f_e(x) - f_e^(k)(x)|^2 for the whole expert FFN, gate-free (DPA-MoE, section 3.2).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpamoe import program
from dpamoe.kernels.grouped import prefixes
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.modes import evaluating
from dpamoe.sites import ExpertWeights, Site, chosen

TOKENS_PER_EXPERT = 256  # 0.07 % regret against the full profile; 16 give 1.4 %
FEWEST_TOKENS = 16  # below this an expert is also shown the tokens that its router scored highest


@dataclass
class Sample:
    """Calibration inputs of one site: for each expert the rows routed to it, and the rows it scored highest.

    rows[e] holds tensors [n, H]; best[e] is (scores [m], rows [m, H]) of the tokens with the highest router score. masked: the
    site's index is a one-hot mask.
    """

    experts: int
    limit: int
    masked: bool = False
    counts: list[int] = field(default_factory=list)
    rows: list[list[Tensor]] = field(default_factory=list)
    best: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        self.counts = [0] * self.experts
        self.rows = [[] for _ in range(self.experts)]

    def full(self) -> bool:
        """Whether every expert has as many tokens as are wanted."""
        return min(self.counts) >= self.limit

    def add(self, hidden: Tensor, index: Tensor, scores: Tensor | None) -> None:
        """Keep the rows of hidden [T, H] that each expert was given by index [T, A], up to the limit."""
        for expert, count in enumerate(self.counts):
            if count < self.limit:
                routed = (index == expert).any(1)
                found = hidden[routed][: self.limit - count]
                if found.shape[0]:
                    self.rows[expert].append(found.clone())
                    self.counts[expert] += found.shape[0]
                if scores is not None and self.counts[expert] < FEWEST_TOKENS:
                    self._keep_best(expert, hidden[~routed], scores[~routed, expert])

    def _keep_best(self, expert: int, hidden: Tensor, scores: Tensor) -> None:
        old_scores, old_rows = self.best.get(expert, (scores[:0], hidden[:0]))
        top, where = torch.cat([old_scores, scores]).topk(min(FEWEST_TOKENS, scores.numel() + old_scores.numel()))
        self.best[expert] = (top, torch.cat([old_rows, hidden])[where])

    def inputs(self, expert: int) -> Tensor | None:
        """Rows to measure an expert on, [n, H]; those it scored highest if it was given fewer than 16; None without any."""
        rows = list(self.rows[expert])
        if self.counts[expert] < FEWEST_TOKENS and expert in self.best:
            rows.append(self.best[expert][1][: FEWEST_TOKENS - self.counts[expert]])
        return torch.cat(rows) if rows else None


def record(model: nn.Module, sites: list[Site], batches: Iterable[tuple[tuple, dict]], limit: int) -> dict[str, Sample]:
    """Run the model over calibration batches (args, kwargs) and keep what reaches each site; stops when all are full.

    Tokens go where the router sends them: no expert is force-fed.
    """
    with collecting(model, sites, limit) as samples, evaluating(model), torch.no_grad():
        for args, kwargs in batches:
            model(*args, **kwargs)
            if all(sample.full() for sample in samples.values()):
                break
    return samples


@contextmanager
def collecting(model: nn.Module, sites: list[Site], limit: int) -> Iterator[dict[str, Sample]]:
    """Keep what reaches each site while the model runs inside the block, up to `limit` tokens for an expert; by path."""
    samples = {site.path: Sample(site.experts, limit, site.masked) for site in sites}
    hooks = []
    for site in sites:
        experts = model.get_submodule(site.place)
        parent = model.get_submodule(site.place.rpartition(".")[0])
        latest: list[Tensor] = []
        hooks += [_watch_scores(child, site.experts, latest) for child in parent.children() if child is not experts]
        hooks.append(experts.register_forward_pre_hook(_collector(samples[site.path], latest)))
    try:
        yield samples
    finally:
        for hook in hooks:
            hook.remove()


def _watch_scores(child: nn.Module, experts: int, latest: list[Tensor]):
    """Remember what looks like router scores: a float [T, E] output of a neighbour of the experts."""

    def watch(module, args, output):
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == experts:
                latest[:] = [value.detach().reshape(-1, experts)]
                return

    return child.register_forward_hook(watch)


def _collector(sample: Sample, latest: list[Tensor]):
    def collect(module, args):
        hidden, index, _ = args
        hidden = hidden.flatten(0, -2)
        index = chosen(index) if sample.masked else index
        scores = latest[0] if latest and latest[0].shape[0] == hidden.shape[0] else None
        sample.add(hidden.detach(), index, scores)
        latest.clear()

    return collect


def residual_table(
    weights: ExpertWeights, up: EncodedWeight, down: EncodedWeight, act: Callable, sample: Sample, post: Callable | None = None
) -> tuple[Tensor, list[int]]:
    """Measure a site: fp64 [E, C + 1], column k the mean squared output error with k planes, column 0 the output itself.

    Also returns the experts that no token reached; those were measured on the tokens their router scored highest, or, without
    scores, got a weight-only estimate scaled to the layer. Raw: the caller
    projects it (`allocate.project`). act, post: what an expert does between its matmuls and behind them.
    """
    experts, planes = weights.up.shape[0], len(up.planes)
    table = torch.full((experts, planes + 1), float("nan"), dtype=torch.float64)
    proxy = torch.empty(experts, planes + 1, dtype=torch.float64)
    for expert in range(experts):
        proxy[expert] = weight_error(weights.up, up, expert) + weight_error(weights.down, down, expert)
        rows = sample.inputs(expert)
        if rows is not None:
            table[expert] = _output_error(weights, up, down, act, post, expert, rows.float())
    reached = ~table[:, 0].isnan()
    scale = torch.ones(planes + 1, dtype=torch.float64)
    if bool(reached.any()):
        scale = (table[reached] / proxy[reached].clamp_min(1e-30)).median(0).values
    table[~reached] = proxy[~reached] * scale
    return table, [expert for expert, count in enumerate(sample.counts) if count == 0 or not bool(reached[expert])]


def _output_error(weights: ExpertWeights, up, down, act: Callable, post: Callable | None, expert: int, rows: Tensor) -> Tensor:
    """Mean |f(x) - f^(k)(x)|^2 over rows [n, H] with finite output, k = 0 … C; fp64 [C + 1], NaN without such a row."""
    biases = [None if bias is None else bias[expert].float() for bias in (weights.up_bias, weights.down_bias)]

    def run(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        result = F.linear(program.run(act, F.linear(rows, up, biases[0]), expert), down, biases[1])
        return result if post is None else program.run(post, result, expert)

    exact = run(rows, weights.up[expert].float(), weights.down[expert].float())
    finite = torch.isfinite(exact).all(1)
    rows, exact = rows[finite], exact[finite]
    errors = [exact.double().square().sum(1).mean()]
    counts = list(range(1, len(up.planes) + 1))
    for up_dense, down_dense in zip(prefixes(up, expert, counts), prefixes(down, expert, counts), strict=True):
        errors.append((exact - run(rows, up_dense, down_dense)).double().square().sum(1).mean())
    return torch.stack(errors).cpu()


def weight_error(weight: Tensor, encoded: EncodedWeight, expert: int) -> Tensor:
    """Relative squared error of one expert's weight, k = 0 … C (1 with no planes); fp64 [C + 1]."""
    dense = weight[expert].float()
    size = dense.double().square().sum().clamp_min(1e-30)
    counts = list(range(1, len(encoded.planes) + 1))
    errors = [(dense - approximate).double().square().sum() / size for approximate in prefixes(encoded, expert, counts)]
    return torch.stack([torch.ones_like(size), *errors]).cpu()
