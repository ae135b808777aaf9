"""Find the routed experts of a model: record one run, match by dataflow, verify by value."""

from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from dpamoe.passes.blocks import Block, find_block
from dpamoe.passes.experts import Candidate, find_candidates
from dpamoe.passes.record import Recording, record
from dpamoe.passes.verify import THE_MODEL, boundary, owner, verify
from dpamoe.sites import Refusal, Site, all_finite


@dataclass(frozen=True)
class Findings:
    """Sites that reproduced their own output, and modules that look like sites but were refused.

    graphs: what takes the place of each block that is a site, by path, with its original float experts inside.
    """

    sites: list[Site]
    refused: list[Refusal]
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)


def find_sites(model: nn.Module, args: tuple = (), kwargs: dict | None = None, any_rows: bool = True) -> Findings:
    """Run the model once and return its routed experts; nothing is changed.

    A candidate is a pair of matmuls by expert-indexed weights with pointwise work between them. It becomes a site when
    sum over a of weight_a * f_(index_a)(hidden), with f recovered from the recording, equals what its own module returns for
    inputs that reach every expert and, with any_rows, at other numbers of tokens. Where no module holds just the experts, the
    block around them becomes a site if, rewritten as a graph, it equals itself at sizes that were not recorded. No names are
    used. Raises ValueError for expert weights that are not finite, and what the model raises.
    """
    recording = record(model, args, kwargs)
    try:
        return _findings(model, recording, any_rows)
    finally:
        recording.release()


def _findings(model: nn.Module, recording: Recording, any_rows: bool) -> Findings:
    findings = Findings([], [])
    for candidate in find_candidates(recording, model):
        _check_finite(model, candidate)
        outcome = _placed_twice(model, owner(candidate)) or _judge(model, recording, candidate, any_rows)
        if isinstance(outcome, Block) and any(_overlap(site, outcome.site) for site in findings.sites):
            outcome = Refusal(outcome.site.path, "it holds other experts that are a site already: one is the most")
        site = outcome.site if isinstance(outcome, Block) else outcome
        if isinstance(site, Refusal):
            site = replace(site, experts=candidate.down.experts)
        known = findings.refused if isinstance(site, Refusal) else findings.sites
        if any(site.path == other.path for other in known):
            continue
        known.append(site)
        if isinstance(outcome, Block):
            findings.graphs[site.path] = outcome.graph
    findings.refused.extend(_unmatched(model, recording, {found.path for found in (*findings.sites, *findings.refused)}))
    return findings


def _judge(model: nn.Module, recording: Recording, candidate: Candidate, any_rows: bool) -> Site | Block | Refusal:
    around = boundary(recording, candidate)
    if not isinstance(around, str):
        return verify(model, recording, candidate, around, any_rows)
    return find_block(model, recording, candidate, around) if any_rows else Refusal(owner(candidate), around)


def _overlap(site: Site, other: Site) -> bool:
    """Whether one of two sites lies inside the other."""
    return f"{site.path}.".startswith(f"{other.path}.") or f"{other.path}.".startswith(f"{site.path}.")


def _placed_twice(model: nn.Module, path: str) -> Refusal | None:
    module = model if path == THE_MODEL else model.get_submodule(path)
    others = [
        other for other, found in model.named_modules(remove_duplicate=False) if found is module and other not in (path, "")
    ]
    if not others:
        return None
    return Refusal(path, f"it also stands at {', '.join(others)}: replaced here, it would still run there")


def _unmatched(model: nn.Module, recording: Recording, known: set[str]) -> list[Refusal]:
    """Modules that hold two or more stacked weights of one length, but in which no experts were matched, and why."""
    called = {call.path for call in recording.calls}
    refused = []
    for path, module in model.named_modules():
        lengths = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        inside = any(f"{path}.".startswith(f"{k}.") or f"{k}.".startswith(f"{path}.") for k in known)
        if len(lengths) < 2 or len(set(lengths)) > 1 or inside:
            continue
        reached = path in called
        reason = "no two matmuls by its weights stand behind each other as in an expert" if reached else NEVER_REACHED
        refused.append(Refusal(path, reason, lengths[0]))
    return refused


NEVER_REACHED = "the example inputs never reached it"


def _check_finite(model: nn.Module, candidate: Candidate) -> None:
    """ValueError that names the tensor: such a module never equals itself, and refusing it would pass over the damage."""
    for family in (*candidate.ups, candidate.down):
        for place, name in enumerate(family.names):
            parameter = model.get_parameter(name)
            if parameter.is_meta or all_finite(parameter):
                continue
            per_expert = (
                parameter.unflatten(0, (family.experts, -1)) if parameter.dim() == 2 and len(family.names) == 1 else parameter
            )
            bad = (
                [place] if len(family.names) > 1 else [e for e, w in enumerate(per_expert) if not bool(torch.isfinite(w).all())]
            )
            shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
            raise ValueError(
                f"{name} holds NaN or infinite weights (experts {shown}): repair the checkpoint or download it again"
            )
