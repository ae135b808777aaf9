"""The settings: how expert weights are encoded, and how planes are spent."""

from dataclasses import asdict, dataclass

from dpamoe.kernels.layout import SCALE_MODES

ALLOCATIONS = ("dpa", "gate-linear", "gate-only", "residual-only", "uniform")
SCOPES = ("token", "dispatch")
FALLBACKS = ("uniform",)
ALLOCATORS = ("exact", "threshold")


@dataclass(frozen=True)
class EncodeSpec:
    """How to encode (DPA-MoE, section 3.1).

    group_size: weights that share their scales, along the input dimension; -1 means the whole row. k_min, k_max: the
    prefixes that decode. scale_mode: "shared" (one fp16 scale per plane and group) or "tied" (one 8-bit scale per group; on
    weights of a few distinct values more planes may then be worse).
    beta: weight of a prefix in the fit grows by this factor with each plane; 1.25 favours few planes, 4 many. iterations:
    rounds of least squares and code assignment.
    """

    group_size: int = 128
    k_min: int = 2
    k_max: int = 8
    scale_mode: str = "shared"
    beta: float = 2.0
    iterations: int = 8

    def __post_init__(self):
        if self.group_size != -1 and self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}: use 2 or more, such as 128, or -1 for whole rows")
        if not 1 <= self.k_min <= self.k_max <= 8:
            raise ValueError(f"k_min {self.k_min} and k_max {self.k_max}: use 1 <= k_min <= k_max <= 8")
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f"scale_mode is {self.scale_mode!r}: use {' or '.join(SCALE_MODES)}")
        if not self.beta > 0 or self.iterations < 0:
            raise ValueError(f"beta {self.beta} must be above 0 and iterations {self.iterations} not negative")

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class SpendSpec:
    """How to spend planes (DPA-MoE, section 3.3).

    budget: average planes per selected expert. allocation: "dpa" weighs residuals by the squared gate; "gate-linear" by
    the gate; "gate-only" gives every expert the same residuals; "residual-only" every expert the same gate; "uniform"
    gives every expert the same planes. scope: "token" holds the budget for each token, "dispatch" for each batch. fallback:
    "uniform" gives every expert the same planes in calls of so many tokens that this is clearly faster, as `dpamoe tune`
    measured on the device; a token's planes then depend on how many others are in its batch. None never does. skip: an
    expert may be left out, which costs no bytes and no computing, where its gate is so small that its planes do more good
    elsewhere; the gates of the others stay as they are. Budgets from 0 on are then in range. allocator: "exact" spends the
    budget on every token, "threshold" on average over tokens and layers: each expert compares its gate with numbers that
    calibration text fixed, a token may get more or less than the budget, and the average drifts a little on other text.
    hold: the numbers follow the text slowly, so that the average comes back to the budget; what a token gets then depends on
    what was computed before it, from `set_spend` on. Without it the average was off by up to 3.2 % on texts of other kinds.
    The allocator "exact" holds the budget anyway.
    """

    budget: float = 4.0
    allocation: str = "dpa"
    scope: str = "token"
    fallback: str | None = None
    skip: bool = False
    allocator: str = "exact"
    hold: bool = False

    def __post_init__(self):
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"allocation is {self.allocation!r}: use one of {', '.join(ALLOCATIONS)}")
        if self.scope not in SCOPES:
            raise ValueError(f"scope is {self.scope!r}: use {' or '.join(SCOPES)}")
        if self.fallback is not None and self.fallback not in FALLBACKS:
            raise ValueError(f"fallback is {self.fallback!r}: use {' or '.join(FALLBACKS)}, or None")
        if not isinstance(self.skip, bool):
            raise ValueError(f"skip is {self.skip!r}: use True or False")
        if not isinstance(self.hold, bool):
            raise ValueError(f"hold is {self.hold!r}: use True or False")
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"allocator is {self.allocator!r}: use {' or '.join(ALLOCATORS)}")
        if self.allocator == "threshold" and (self.allocation, self.scope) != ("dpa", "token"):
            raise ValueError(
                f"allocator 'threshold' lets every expert decide alone, and allocation is {self.allocation!r}, scope "
                f"{self.scope!r}: use it with allocation 'dpa' and scope 'token', or use allocator 'exact'"
            )

    def least(self, k_min: int) -> int:
        """Fewest planes of a selected expert, where prefixes from k_min planes on decode."""
        return 0 if self.skip else k_min


def check_budget(budget: float, k_min: int, k_max: int) -> float:
    """Return a budget that lies in [k_min, k_max]; raise ValueError, with the range, for any other."""
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget is {budget!r}: give a number of planes, {k_min} to {k_max}")
    if not k_min <= budget <= k_max:
        raise ValueError(
            f"budget is {budget} planes per expert, this model can spend {k_min} to {k_max}: choose a value in that range"
        )
    return float(budget)
