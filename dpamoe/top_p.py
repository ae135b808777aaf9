"""Dynamic top-p routing composed with any-precision experts: a token keeps only its most probable experts (appendix F)."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpamoe.modules import EncodedExperts, encoded_experts

PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores: scores.softmax(-1),
    "sigmoid": torch.sigmoid,
    "as they are": lambda scores: scores,
}
MATCH = 0.02  # gates may be bf16: their shares of a token's sum may differ by this much from those of the probabilities
EQUAL = 0.02  # sums of bf16 gates that are one number agree to this, relative


@dataclass
class Usage:
    """What one site computed: tokens that reached it, and pairs of a token and an expert by number of planes, int64 [C + 1].

    plane_bytes, fixed_bytes: of one expert, those that a plane adds and those read whatever the number of planes.
    """

    spent: Tensor
    plane_bytes: float
    fixed_bytes: float
    tokens: int = 0

    @property
    def pairs(self) -> int:
        """Experts computed, over all tokens."""
        return int(self.spent[1:].sum())

    @property
    def planes(self) -> int:
        """Planes spent, over all tokens."""
        return int((self.spent * torch.arange(self.spent.numel(), device=self.spent.device)).sum())


@dataclass
class TopP:
    """What a model spent inside a `top_p` block, by site. Figures raise ValueError before any token was routed."""

    p: float
    sites: dict[str, Usage] = field(default_factory=dict)

    @property
    def active(self) -> float:
        """Experts per token, mean over tokens and layers."""
        return sum(usage.pairs for usage in self.sites.values()) / self._tokens()

    @property
    def mean_planes(self) -> float:
        """Planes per computed expert."""
        self._tokens()
        pairs = sum(usage.pairs for usage in self.sites.values())
        return sum(usage.planes for usage in self.sites.values()) / max(pairs, 1)

    @property
    def megabytes(self) -> float:
        """MB (10^6 bytes) of encoded experts that one token reads in all layers, scales and offsets included."""
        self._tokens()
        used = [u for u in self.sites.values() if u.tokens]
        return sum((u.planes * u.plane_bytes + u.pairs * u.fixed_bytes) / u.tokens for u in used) / 1e6

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        figures = {"active": self.active, "mean_planes": self.mean_planes, "megabytes_per_token": self.megabytes}
        return {"p": self.p, "tokens": max(usage.tokens for usage in self.sites.values()), **figures}

    def _tokens(self) -> int:
        total = sum(usage.tokens for usage in self.sites.values())
        if total == 0:
            raise ValueError("no token was routed inside the top_p block: run the model inside it before asking what it spent")
        return total


@contextlib.contextmanager
def top_p(model: nn.Module, p: float) -> Iterator[TopP]:
    """Inside the block, every token of a transformed model keeps the fewest of its experts that reach probability p.

    They are taken from the most probable on; at least one, at most those that its router selected. A probability is the
    router's score (softmax or sigmoid) divided by the sum over all experts, which for a softmax changes nothing. Dropped
    choices become padding, which costs no planes and no bytes: a token spends the budget times the experts it keeps. Where
    the router normalises its gates, those of a token keep their sum; elsewhere they stay as they are. With p = 1 nothing
    changes.

    Yields what was spent. Raises TypeError for a compiled model, ValueError for p outside 0 to 1, for experts chosen by masks
    or with identity experts, and, when the model runs, for a site whose router probabilities are not found.
    """
    held = _checked(model, p)
    spent, hooks = TopP(float(p)), []
    try:
        for path, experts in held.items():
            usage = spent.sites[path] = _usage(experts)
            router = Router(path, experts.site.experts)
            parent = model.get_submodule(path.rpartition(".")[0])
            inside = set(experts.modules())
            neighbours = [(name, m) for name, m in parent.named_modules() if m is not parent and m not in inside]
            hooks += [module.register_forward_hook(router.watch(name)) for name, module in neighbours]
            hooks += _limit(experts, router, usage, p)
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def _checked(model: nn.Module, p: float) -> dict[str, EncodedExperts]:
    """The encoded experts of a model that top-p routing can limit."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"p is {p!r}: give a probability, 0 to 1")
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}: use a probability from 0, which keeps one expert of each token, to 1, which keeps all")
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        raise TypeError("the model is compiled, and compiled code would not see the dropped experts: give the model itself")
    held = encoded_experts(model)
    if not held:
        raise ValueError(f"{type(model).__name__} holds no encoded experts: call dpamoe.transform or dpamoe.load first")
    for path, experts in held.items():
        if experts.site.masked or experts.site.identity:
            kind = "are chosen by a one-hot mask" if experts.site.masked else "stand beside identity experts"
            raise ValueError(f"top-p routing is not supported for {path}: its experts {kind}; use a model without such sites")
    return held


def _usage(experts: EncodedExperts) -> Usage:
    plane, fixed = experts.bytes_per_plane()
    return Usage(torch.zeros_like(experts.spent), plane / experts.site.experts, fixed / experts.site.experts)


def _limit(experts: EncodedExperts, router: "Router", usage: Usage, p: float) -> list:
    """Hooks that drop choices before the experts are called, and count what was spent behind them."""
    before = torch.zeros_like(experts.spent)

    def drop(module, args):
        hidden, index, weights = args
        usage.tokens += index.shape[0]
        before.copy_(module.spent)
        return hidden, *router.limit(index, weights, p)

    def count(module, args, output):
        usage.spent += module.spent - before

    return [experts.register_forward_pre_hook(drop), experts.register_forward_hook(count)]


@dataclass
class Router:
    """What is learned of one site's router while it runs: which scores its gates come from, and whether they are normalised.

    latest: float outputs [T, E] of the experts' neighbours in this call, by name. worst: largest distance so far of the gates
    from each reading of each of them. sums, masses: least and largest sum of a token's gates, and of its probabilities.
    """

    path: str
    experts: int
    latest: dict[str, Tensor] = field(default_factory=dict)
    worst: dict[tuple[str, str], float] = field(default_factory=dict)
    sums: tuple[float, float] = (float("inf"), 0.0)
    masses: tuple[float, float] = (float("inf"), 0.0)

    def watch(self, name: str):
        """A forward hook that remembers what may be router scores."""

        def hook(module, args, output):
            for number, value in enumerate(output if isinstance(output, tuple | list) else (output,)):
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (self.experts,):
                    self.latest[f"{name}.{number}"] = value.detach().reshape(-1, self.experts)

        return hook

    def limit(self, index: Tensor, weights: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """Index and weights [T, A] with dropped choices as padding: id E, gate 0."""
        latest, self.latest = self.latest, {}
        held = (index >= 0) & (index < self.experts)
        if index.shape[1] == 1 or not bool(held.any()):
            return index, weights
        gates = weights.detach().double().masked_fill(~held, 0.0)
        selected = self._selected(latest, index.long().where(held, 0), held, gates)
        keep = most_probable(selected, held, p)
        dropped = held & ~keep
        if self._normalised(gates, selected, held):
            left = gates.masked_fill(dropped, 0.0).sum(1, keepdim=True)
            scale = torch.where(left > 0, gates.sum(1, keepdim=True) / left, 1.0)
            weights = (weights * scale).to(weights.dtype)
        return index.masked_fill(dropped, self.experts), weights.masked_fill(dropped, 0.0)

    def _selected(self, latest: dict[str, Tensor], ids: Tensor, held: Tensor, gates: Tensor) -> Tensor:
        """Router probabilities of the selected experts, fp64 [T, A], 0 for padding: those that the gates are made of."""
        readings = {}
        for name, scores in latest.items():
            if scores.shape[0] == ids.shape[0]:
                for kind, probabilities in PROBABILITIES.items():
                    readings[name, kind] = probabilities(scores.double())
        shares = _shares(gates)
        found = {}
        for reading, every in readings.items():
            over_all = ((every > 0).sum(1) > ids.shape[1]).any() or ids.shape[1] == self.experts  # not the gates, scattered
            if over_all and bool((every >= 0).all()):
                found[reading] = _shares(every).gather(1, ids).masked_fill(~held, 0.0)
                distance = float((_shares(found[reading]) - shares).abs().nan_to_num(nan=float("inf")).max())
                self.worst[reading] = max(self.worst.get(reading, 0.0), distance)
        best = min(found, key=lambda reading: self.worst[reading], default=None)
        if best is None or not self.worst[best] <= MATCH:
            raise ValueError(
                f"the router probabilities of {self.path} were not found: no module beside it returns scores over its "
                f"{self.experts} experts whose softmax or sigmoid its gates follow; top-p routing needs them"
            )
        return found[best]

    def _normalised(self, gates: Tensor, selected: Tensor, held: Tensor) -> bool:
        """Whether the gates of every token so far sum to one number, though the probabilities that they come from do not.

        While these do not differ either, as with a single token, gates that equal them are taken as not normalised.
        """
        whole = held.all(1)
        self.sums = _widened(self.sums, gates[whole].sum(1))
        self.masses = _widened(self.masses, selected[whole].sum(1))
        if not self.sums[1] - self.sums[0] <= EQUAL * self.sums[1]:
            return False
        if self.masses[1] - self.masses[0] > 2 * EQUAL * self.masses[1]:
            return True
        return self.masses[1] > 1 - EQUAL or abs(self.sums[1] - self.masses[1]) > EQUAL


def most_probable(selected: Tensor, held: Tensor, p: float) -> Tensor:
    """Which choices of a token to keep, bool [T, A]: the fewest whose probabilities `selected` [T, A] sum to p; at least one.

    A choice stays if those that are more probable sum to less than p; ties go to the lower slot. With p = 1 all that are held
    stay, whatever rounding makes of their sum.
    """
    ranked, order = selected.masked_fill(~held, -1.0).sort(dim=1, descending=True, stable=True)
    before = torch.nn.functional.pad(ranked.clamp_min(0.0).cumsum(1)[:, :-1], (1, 0))
    kept = (before < p) | (p >= 1)
    kept[:, 0] = True
    return torch.zeros_like(held).scatter_(1, order, kept) & held


def _shares(values: Tensor) -> Tensor:
    """Each number of a row divided by the sum of the row; 0 where that is 0."""
    return values / values.sum(1, keepdim=True).clamp_min(1e-300)


def _widened(bounds: tuple[float, float], values: Tensor) -> tuple[float, float]:
    """Least and largest of the numbers seen before and now."""
    if values.numel() == 0:
        return bounds
    return min(bounds[0], float(values.min())), max(bounds[1], float(values.max()))
