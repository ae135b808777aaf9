"""All experiments of the paper on one model, each kept as soon as it is there; `paper_report` makes the text of them.

frontier/           `dpamoe eval` with KL, all budgets, allocations and static formats
tasks/              `dpamoe eval` with accuracy, at a few budgets
speed.json, cross_terms.json, storage.json, top_p.json
"""

from collections.abc import Callable, Sequence
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
from dpamoe.spec import EncodeSpec

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
    frontier.check_measures(wanted)
    whole = frontier.plan(replace(wanted, tasks=(), include_path=None, limit=None))
    speed.prompts_of(whole.windows, experiments.prompt_tokens, experiments.sequences)
    budgets = spendable(TASK_BUDGETS, whole.spec)
    tasks = None
    if wanted.tasks:
        baselines = tuple(name for name in wanted.baselines if name == "uniform" or name in whole.formats)
        tasks = frontier.plan(replace(wanted, text=None, max_tokens=None, budgets=budgets, baselines=baselines))
    return Plans(whole, tasks, experiments)


def run(plans: Plans, folder: Path) -> dict:
    """Run what the folder lacks; returns frontier, tasks (None if not asked for), speed, cross_terms, storage and top_p."""
    check_folder(folder)
    folder.mkdir(exist_ok=True)
    parts = {"frontier": plans.frontier} | ({} if plans.tasks is None else {"tasks": plans.tasks})
    folders = {name: open_folder(folder / name, part.settings) for name, part in parts.items()}
    found = {name: frontier.run(part, folders[name]) for name, part in parts.items()}
    return {"tasks": None, **found, **_experiments(plans, folder)}


def check_folder(folder: Path) -> None:
    """Raise ValueError unless a report can be written there: a folder to make, an empty one, or that of an earlier report."""
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"folder {folder.absolute().parent}, which should hold {folder.name}, does not exist: make it first")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "frontier").is_dir())):
        raise ValueError(f"{folder} exists and is no folder of an earlier report: choose another --output-dir")


def spendable(budgets: Sequence[float], spec: EncodeSpec) -> tuple[float, ...]:
    """Those of the budgets that a model can spend, or all of its planes if there is none."""
    return tuple(budget for budget in budgets if spec.k_min <= budget <= spec.k_max) or (float(spec.k_max),)


def _experiments(plans: Plans, folder: Path) -> dict:
    """The experiments that need a loaded model, from their files or now."""
    jobs: dict[str, Callable[[nn.Module], object]] = {
        "storage": lambda model: storage_rows(model),
        "cross_terms": lambda model: _cross_terms(plans, model),
        "top_p": lambda model: _top_p(plans, model),
        "speed": lambda model: _speed(plans, model),
    }
    settings = {name: _settings(plans, name) for name in jobs}
    found = {name: _kept(folder / f"{name}.json", settings[name]) for name in jobs}
    missing = [name for name, value in found.items() if value is None]
    model = frontier.encoded_model(plans.frontier, plans.frontier.spec) if missing else None
    for name in track(missing, "experiments"):
        found[name] = jobs[name](model)
        write_json(folder / f"{name}.json", {"settings": settings[name], "found": found[name]})
    return found


def _settings(plans: Plans, name: str) -> dict:
    """What an experiment depends on, as JSON: kept results of other settings are measured again."""
    asked = plans.experiments
    own = {
        "storage": {},
        "cross_terms": {"tokens": asked.cross_tokens},
        "top_p": {"p": list(asked.p), "tasks": None if plans.tasks is None else plans.tasks.settings},
        "speed": {"sequences": asked.sequences, "prompt": asked.prompt_tokens, "new": asked.new_tokens},
    }
    return plans.frontier.settings | own[name]


def _kept(file: Path, settings: dict):
    """What an earlier run with these settings found, if any."""
    if not file.is_file():
        return None
    held = read_json(file, "delete it, and run again")
    return held.get("found") if held.get("settings") == settings else None


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


def _top_p(plans: Plans, model: nn.Module) -> dict:
    """Rows for every p, of Uniform-k and DPA; KL is to the full-precision model with all of its experts.

    {"rows", "refused"}: refused says why a model cannot be routed so, else it is None.
    """
    full, rows = plans.frontier, []
    (budget,) = spendable((TOP_P_BUDGET,), full.spec)
    original = evaluate.to_run(storage.load_original(full.source), full.wanted.device)
    with measure_reference(original, full.windows) as reference, api.spending_kept(model):
        del original
        scorer = evaluate.Scorer(reference, frontier.accuracy_of(plans.tasks or full))
        for p in track(plans.experiments.p, "top-p", str):
            for allocation in ("uniform", "dpa"):
                api.set_spend(model, budget=budget, allocation=allocation, allocator="exact")
                used: dict = {}
                try:
                    with top_p.top_p(model, p) as routed:
                        scores = scorer.measure(model, lambda used=used, routed=routed: used.update(routed.as_dict()))
                except ValueError as error:
                    return {"rows": [], "refused": str(error)}
                rows.append({"allocation": allocation, "budget": budget, **used, **scores})
    return {"rows": rows, "refused": None}


def _speed(plans: Plans, model: nn.Module) -> dict:
    asked = plans.experiments
    prompts = speed.prompts_of(plans.frontier.windows, asked.prompt_tokens, asked.sequences)
    budgets = spendable(SPEED_BUDGETS, plans.frontier.spec)
    return speed.compare_speed(model, prompts, budgets, asked.new_tokens, torch.device(plans.frontier.wanted.device))
