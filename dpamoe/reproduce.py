"""All experiments of the paper on one model, each kept as soon as it is there; `paper_report` makes the text of them.

frontier/           `dpamoe eval` with KL, all budgets, allocations and static formats
tasks/              `dpamoe eval` with accuracy, at a few budgets
speed.json, cross_terms.json, storage.json, top_p.json
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from dpamoe import api, cross_terms, evaluate, frontier, overhead, speed, storage, top_p
from dpamoe.evaluation_folder import open_folder
from dpamoe.files import read_json, write_json
from dpamoe.modules import encoded_experts
from dpamoe.progress import track
from dpamoe.score import measure_reference

TASK_BUDGETS = (2.5, 3.0, 4.0)
SPEED_BUDGETS = (3.0, 4.0)
PROBABILITIES = (0.25, 0.5, 0.75, 1.0)
TOP_P_BUDGET = 4.0


@dataclass(frozen=True)
class Experiments:
    """What to run beside the frontier. p: of top-p routing. sequences, prompt_tokens, new_tokens: of the speed measurement."""

    p: tuple[float, ...] = PROBABILITIES
    sequences: int = 20
    prompt_tokens: int = 128
    new_tokens: int = 32
    cross_tokens: int = cross_terms.TOKENS


@dataclass(frozen=True)
class Plans:
    """Checked plans of the two evaluations; tasks is None where none were asked for."""

    frontier: frontier.Plan
    tasks: frontier.Plan | None
    experiments: Experiments


def plan(wanted: frontier.Wanted, experiments: Experiments) -> Plans:
    """Check everything before any long work; ValueError, one sentence, for the first thing that is wrong."""
    for p in experiments.p:
        if not 0 < p <= 1:
            raise ValueError(f"p is {p}: top-p routing takes probabilities above 0, up to 1")
    whole = frontier.plan(replace(wanted, tasks=(), include_path=None, limit=None))
    speed.prompts_of(whole.windows, experiments.prompt_tokens, experiments.sequences)
    budgets = tuple(budget for budget in TASK_BUDGETS if whole.spec.k_min <= budget <= whole.spec.k_max)
    tasks = None
    if wanted.tasks:
        baselines = tuple(name for name in wanted.baselines if name == "uniform" or name in whole.formats)
        tasks = frontier.plan(replace(wanted, text=None, max_tokens=None, budgets=budgets, baselines=baselines))
    return Plans(whole, tasks, experiments)


def run(plans: Plans, folder: Path) -> dict:
    """Run what the folder lacks; returns frontier, tasks (None if not asked for), speed, cross_terms, storage and top_p."""
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"folder {folder.absolute().parent}, which should hold {folder.name}, does not exist: make it first")
    folder.mkdir(exist_ok=True)
    parts = {"frontier": plans.frontier} | ({} if plans.tasks is None else {"tasks": plans.tasks})
    folders = {name: open_folder(folder / name, part.settings) for name, part in parts.items()}
    found = {name: frontier.run(part, folders[name]) for name, part in parts.items()}
    return {"tasks": None, **found, **_experiments(plans, folder)}


def _experiments(plans: Plans, folder: Path) -> dict:
    """The experiments that need a loaded model, from their files or now."""
    jobs: dict[str, Callable[[nn.Module], object]] = {
        "storage": lambda model: storage_rows(model),
        "cross_terms": lambda model: _cross_terms(plans, model),
        "top_p": lambda model: _top_p(plans, model),
        "speed": lambda model: _speed(plans, model),
    }
    settings = {**plans.frontier.settings, "experiments": _as_json(plans.experiments)}
    found = {name: _kept(folder / f"{name}.json", settings) for name in jobs}
    missing = [name for name, value in found.items() if value is None]
    model = frontier.encoded_model(plans.frontier) if missing else None
    for name in track(missing, "experiments"):
        found[name] = jobs[name](model)
        write_json(folder / f"{name}.json", {"settings": settings, "found": found[name]})
    return found


def _as_json(experiments: Experiments) -> dict:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(experiments).items()}


def _kept(file: Path, settings: dict):
    """What an earlier run with these settings found, if any."""
    if not file.is_file():
        return None
    held = read_json(file, "delete it, and run again")
    return held["found"] if held.get("settings") == settings else None


def storage_rows(model: nn.Module) -> list[dict]:
    """`storage_overhead` of each kind of site, with the number of sites that are alike."""
    rows: dict[tuple, dict] = {}
    for experts in encoded_experts(model).values():
        site = experts.site
        key = (site.experts, site.hidden, site.inner, site.out, site.up_rows)
        row = rows.setdefault(key, overhead.storage_overhead(site, experts.spec) | {"sites": 0, "experts": site.experts})
        row["sites"] += 1
    return list(rows.values())


def _cross_terms(plans: Plans, model: nn.Module) -> list[dict]:
    original = evaluate.to_run(storage.load_original(plans.frontier.source), plans.frontier.wanted.device)
    batches = [((), {"input_ids": window[None].to(plans.frontier.wanted.device)}) for window in plans.frontier.windows]
    return cross_terms.cross_terms(original, model, batches, plans.experiments.cross_tokens)


def _top_p(plans: Plans, model: nn.Module) -> list[dict]:
    """KL to the full-precision model with all of its experts, at each p, of the full-precision weights too (8 planes)."""
    full = plans.frontier
    rows = []
    original = evaluate.to_run(storage.load_original(full.source), full.wanted.device)
    with measure_reference(original, full.windows) as reference, api.spending_kept(model):
        del original
        scorer = evaluate.Scorer(reference, frontier.accuracy_of(plans.tasks or full))
        for p in track(plans.experiments.p, "top-p", str):
            for allocation in ("uniform", "dpa"):
                api.set_spend(model, budget=TOP_P_BUDGET, allocation=allocation)
                with top_p.top_p(model, p) as used:
                    scores = scorer.measure(model)
                rows.append({"allocation": allocation, "budget": TOP_P_BUDGET, **used.as_dict(), **scores})
    return rows


def _speed(plans: Plans, model: nn.Module) -> dict:
    asked = plans.experiments
    prompts = speed.prompts_of(plans.frontier.windows, asked.prompt_tokens, asked.sequences)
    spec = plans.frontier.spec
    budgets = [budget for budget in SPEED_BUDGETS if spec.k_min <= budget <= spec.k_max] or [float(spec.k_max)]
    return speed.compare_speed(model, prompts, budgets, asked.new_tokens, torch.device(plans.frontier.wanted.device))
