"""What a router computes from its logits, in plain torch: scores, who is chosen, and the gates of the chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = {"logits": lambda logits: logits, "softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}
NORMS = ("none", "sum", "softmax")
GROUP_SCORES = ("max", "two")
MOST_EXPERTS = 4096  # that a kernel takes, which has a row of scores in registers
FEW_TOKENS = 8  # for which the kernel reads the weight of the router again and again
LEAST_SUM = 1e-20  # added to the sum that gates are divided by, so that scores that are all 0 give gates of 0


@dataclass(frozen=True)
class Rule:
    """How a router chooses.

    active: experts of a token. score: of an expert, see SCORES. norm: gates as they are, made to sum to 1, or softmax over the
    chosen; then times scale. groups: consecutive experts, of which the best kept_groups are left, by their largest choice
    score ("max") or the sum of the two largest ("two"); 1 for none.
    """

    active: int
    score: str
    norm: str
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"

    def check(self, experts: int) -> None:
        """Raises ValueError for a rule that does not exist or cannot choose among so many experts."""
        for name, value, known in (
            ("score", self.score, SCORES), ("norm", self.norm, NORMS), ("group_score", self.group_score, GROUP_SCORES)
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} {value!r} is no rule of a router: use one of {', '.join(known)}")
        if not 1 <= self.kept_groups <= self.groups or experts % self.groups:
            raise ValueError(
                f"{self.kept_groups} of {self.groups} groups do not fit {experts} experts: groups must divide them evenly, "
                "and 1 to all of them be kept"
            )
        left = experts // self.groups * self.kept_groups
        if not 1 <= self.active <= left:
            raise ValueError(f"{self.active} experts cannot be chosen among the {left} that groups leave: choose 1 to {left}")


def check(logits: Tensor, bias: Tensor | None, rule: Rule) -> None:
    """Raises ValueError for tensors or a rule that do not fit each other."""
    if logits.dim() != 2:
        raise ValueError(f"logits {list(logits.shape)} must be [tokens, experts]: flatten the tokens")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"bias {list(bias.shape)} must hold one number for each of {logits.shape[1]} experts")
    rule.check(logits.shape[1])


def choice(scores: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
    """What experts are chosen by, fp32 [T, E]: scores with the bias, -inf in groups that are left out."""
    found = scores if bias is None else scores + bias.float()
    if rule.groups == 1:
        return found
    best = group_scores(found, rule)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, first(best, rule.kept_groups), True)
    return found.unflatten(-1, (rule.groups, -1)).masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def group_scores(found: Tensor, rule: Rule) -> Tensor:
    """What groups are kept by, [T, groups], from what experts are chosen by, [T, E]."""
    grouped = found.unflatten(-1, (rule.groups, -1))
    return grouped.topk(min(2, grouped.shape[-1]) if rule.group_score == "two" else 1, -1).values.sum(-1)


def first(values: Tensor, count: int) -> Tensor:
    """Places of the largest values of each row, int64 [T, count], falling; equal ones in their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def choose(logits: Tensor, bias: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [T, A], the best first, and their scores, fp32 [T, A]."""
    scores = SCORES[rule.score](logits.float())
    ids = first(choice(scores, bias, rule), rule.active)
    return ids, scores.gather(-1, ids)


def weights(chosen: Tensor, rule: Rule) -> Tensor:
    """Gates of the chosen, fp32, from their scores [T, A]."""
    if rule.norm == "softmax":
        chosen = chosen.softmax(-1)
    elif rule.norm == "sum":
        chosen = chosen / (chosen.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen * rule.scale


def route(logits: Tensor, bias: Tensor | None, rule: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [T, A], the best first, and their gates [T, A]; arguments as in `ops.route`."""
    ids, chosen = choose(logits, bias, rule)
    return ids, weights(chosen, rule).to(dtype)
