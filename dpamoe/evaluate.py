"""Quality against size: KL to full precision and perplexity of every allocation over a range of budgets.

KL is mean KL(full || encoded) in nats per predicted token. The full-precision log-probabilities are computed once and
streamed from a scratch file, so that only one model is in memory at a time.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpamoe import api
from dpamoe.progress import track
from dpamoe.spec import ALLOCATIONS
from dpamoe.text import batches

BUDGETS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
REPORTED = ("uniform", "dpa", "gate-only", "residual-only")
ROWS = 1024  # logits compared at a time, so that they stay in cache
BATCH = 8


@dataclass(frozen=True)
class Score:
    """Mean KL to the reference (None for the reference itself), and mean negative log-likelihood, nats per token."""

    kl: float | None
    nll: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood, at most e^700."""
        return math.exp(min(self.nll, 700.0))


class ReferenceLogits:
    """Log-probabilities of the full-precision model over all windows, fp32 on disk until closed."""

    def __init__(self, model: nn.Module, windows: Sequence[Tensor]):
        self.windows = batches(list(windows), BATCH)
        self._file = tempfile.TemporaryFile(prefix="dpamoe-reference-")  # noqa: SIM115  closed in __exit__
        self._blocks: list[tuple[int, tuple[int, int]]] = []
        total = count = 0.0
        for ids, logits in _run(model, track(self.windows, "reference", _shape)):
            log_p = logits.log_softmax(-1)
            if not bool(torch.isfinite(log_p).all()):
                raise ValueError("the full-precision model gives outputs that are not finite: repair the checkpoint first")
            total, count = total + _nll(log_p, ids), count + log_p.shape[0]
            self._blocks.append((self._file.tell(), tuple(log_p.shape)))
            self._file.write(log_p.cpu().numpy().tobytes())
        self.score = Score(None, total / count)

    def __enter__(self) -> "ReferenceLogits":
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def block(self, number: int) -> Tensor:
        """Log-probabilities of one batch of windows, fp32 [tokens, vocabulary]."""
        offset, shape = self._blocks[number]
        return torch.from_numpy(np.memmap(self._file, dtype=np.float32, mode="c", offset=offset, shape=shape))

    def compare(self, model: nn.Module) -> Score:
        """Score a model on the same windows."""
        divergence = total = 0.0
        count = 0
        for number, (ids, logits) in enumerate(_run(model, self.windows)):
            reference = self.block(number)
            for rows in range(0, logits.shape[0], ROWS):
                log_q = logits[rows : rows + ROWS].log_softmax(-1)
                log_p = reference[rows : rows + ROWS].to(log_q.device)
                divergence += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
                total += _nll(log_q, ids[rows : rows + ROWS])
            count += logits.shape[0]
        return Score(divergence / count, total / count)


def _shape(ids: Tensor) -> str:
    return f"{ids.shape[0]} windows of {ids.shape[1]} tokens"


def _run(model: nn.Module, windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Targets [N] and fp32 logits [N, V] of each batch of windows."""
    device = next(model.parameters()).device
    for ids in windows:
        with torch.no_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1]
        yield ids[:, 1:].flatten().to(device), logits.flatten(0, 1).float()


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    return -float(log_probabilities.gather(1, targets[:, None]).sum(dtype=torch.float64))


@dataclass(frozen=True)
class Sizes:
    """Bytes of everything but encoded experts, in the checkpoint's dtype; with the model they give the effective size."""

    other_bytes: int

    @staticmethod
    def of(model: nn.Module, element_bytes: dict[str, int] | None = None) -> "Sizes":
        """Measure a transformed model; element_bytes (`element_sizes` of the model before it was cast) overrides its dtypes."""
        tensors = dict(model.named_parameters())
        for path, experts in api.encoded_experts(model).items():
            layout = experts.site.layout
            stacks = [
                (layout.up_biases[0] if layout.up_biases else None, experts.up_bias),
                (layout.down_bias, experts.down_bias),
            ]
            tensors |= {f"{path}.{stack.names[0]}": bias for stack, bias in stacks if stack is not None}
        sizes = element_bytes or {}
        return Sizes(sum(tensor.numel() * sizes.get(name, tensor.element_size()) for name, tensor in tensors.items()))

    def model_bytes(self, model: nn.Module, planes: float) -> int:
        """Size of the whole model with every expert at `planes` planes (the paper's effective weight size)."""
        return round(self.other_bytes + api.expert_bytes(model, planes))


def element_sizes(model: nn.Module) -> dict[str, int]:
    """Bytes per element of every parameter, by name."""
    return {name: parameter.element_size() for name, parameter in model.named_parameters()}


def evaluate(
    model: nn.Module, reference: ReferenceLogits, sizes: Sizes, budgets: Sequence[float], allocations: Sequence[str] = REPORTED
) -> list[dict]:
    """Score every budget and allocation; one row per budget with the fields of `dpamoe eval --json`.

    Uniform is scored where the budget is a whole number of planes, else it is null. The model's spending is put back.
    """
    jobs = [(b, a) for b in budgets for a in ALLOCATIONS if a in allocations and (a != "uniform" or float(b).is_integer())]
    scores, spent = {}, {}
    with api.spending_kept(model):
        for budget, allocation in track(jobs, "evaluate", lambda job: f"budget {job[0]:g} {job[1]}"):
            api.set_spend(model, budget=budget, allocation=allocation)
            api.stats(model, reset=True)
            scores[budget, allocation] = reference.compare(model)
            spent[budget, allocation] = api.stats(model, reset=True)["mean_planes"]
    return [_row(model, sizes, budget, allocations, scores, spent) for budget in budgets]


def _row(model: nn.Module, sizes: Sizes, budget: float, allocations: Sequence[str], scores: dict, spent: dict) -> dict:
    def score(allocation: str, field: str) -> float | None:
        found = scores.get((budget, allocation))
        return None if found is None else getattr(found, field)

    row = {
        "budget": budget,
        "mean_planes": spent.get((budget, "dpa")),
        "bits_per_weight": api.bits_per_weight(model, budget),
        "weight_bytes": sizes.model_bytes(model, budget),
    }
    wanted = dict.fromkeys((*REPORTED, *allocations))
    row |= {f"kl_{allocation.replace('-', '_')}": score(allocation, "kl") for allocation in wanted}
    return row | {"ppl_dpa": score("dpa", "perplexity"), "ppl_uniform": score("uniform", "perplexity")}


def result(name: str, model: nn.Module, reference: ReferenceLogits, rows: list[dict]) -> dict:
    """The object that `dpamoe eval --json` prints."""
    held = api.report(model)
    return {
        "model": name,
        "sites": held.sites,
        "experts": held.experts,
        "full_precision": {"ppl": reference.score.perplexity},
        "rows": rows,
    }


def to_run(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Put a model where and how it is scored: fp32 on CPU, its own dtype elsewhere."""
    model = model.to(device)
    return model.float() if torch.device(device).type == "cpu" else model


def table(outcome: dict) -> str:
    """The rows as text: budget, size, KL of each allocation, perplexity."""
    allocations = [key for key in outcome["rows"][0] if key.startswith("kl_")]
    head = [
        "budget",
        "planes",
        "bits/w",
        "MB",
        *(key.replace("kl_", "KL ").replace("_", "-") for key in allocations),
        "ppl dpa",
    ]
    lines = [head]
    for row in outcome["rows"]:
        cells = [f"{row['budget']:g}", _cell(row["mean_planes"], ".3f"), f"{row['bits_per_weight']:.3f}"]
        cells += [
            f"{row['weight_bytes'] / 1e6:.2f}",
            *(_cell(row[key], ".5f") for key in allocations),
            _cell(row["ppl_dpa"], ".3f"),
        ]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(
        [text[0], "-" * len(text[0]), *text[1:], f"full precision: perplexity {outcome['full_precision']['ppl']:.3f}"]
    )


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
