"""`dpamoe inspect`: what an encoded folder holds and whether it is whole, or which experts a model folder has."""

from pathlib import Path

from torch import nn

from dpamoe import calibration, checkpoint, compare, storage
from dpamoe.layers import on_meta
from dpamoe.passes import find, weightless
from dpamoe.presets import name_of
from dpamoe.sites import Site
from dpamoe.source import open_source

NAME = "inspect"
HELP = "say what an encoded folder holds and whether it is complete, or which routed experts a model has"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an encoded or original model folder")
    parser.add_argument("--verify", action="store_true", help="load an original model and verify its experts by value")


def run(args) -> dict:
    """Read headers of an encoded folder; look for the experts of an original model, without its weights unless verifying."""
    if checkpoint.is_encoded(args.model):
        return _encoded(args.model)
    return _verified(args.model) if args.verify else _sketched(args.model)


def _encoded(folder: str) -> dict:
    settings, weight_map = checkpoint.read_index(folder)
    hashes = compare.check_hashes(folder)
    sizes = {name: (Path(folder) / name).stat().st_size for name in sorted(set(weight_map.values()))}
    tensors = checkpoint.tensor_bytes(folder, sizes)
    planes, weights = [], sum(Site.from_dict(fields).weights for fields in settings["sites"])
    for k in range(settings["k_min"], settings["k_max"] + 1):
        dropped = tuple(f"model-plane-{c}-" for c in range(k, settings["k_max"]))
        read = sum(size for name, size in sizes.items() if not name.startswith(dropped))
        encoded = checkpoint.expected_tensors({**settings, "k_max": k})
        bits = 8 * sum(tensors[name] for name in encoded if not name.endswith(".residuals")) / weights
        planes.append({"k": k, "bits_per_weight": bits, "bytes": read})
    kept = ("group_size", "k_min", "k_max", "scale_mode", "default_budget", "source", "sites", "unreached")
    spend = checkpoint.spend_of(settings)
    return {
        "model": folder,
        "encoded": True,
        "complete": True,
        "hashes": hashes,
        **{name: settings[name] for name in kept},
        "budget_scope": spend.scope,
        "skip": spend.skip,
        "allocator": spend.allocator,
        "preset": name_of(checkpoint.spec_of(settings), spend),
        "sensitivities": checkpoint.is_weighed(settings, weight_map),
        "planes": planes,
    }


def _sketched(folder: str) -> dict:
    model = on_meta(open_source(folder))
    sketches = weightless.sketch_sites(model, *calibration.example_batch(model, None))
    refused = {sketch.path: sketch.reason for sketch in sketches if sketch.reason}
    held = sum(sketch.parameters for sketch in sketches)
    return _described(folder, model, [sketch for sketch in sketches if not sketch.reason], refused, held, verified=False)


def _verified(folder: str) -> dict:
    model = storage.load_original(folder)
    findings = find.find_sites(model, *calibration.example_batch(model, None))
    refused = {refusal.path: refusal.reason for refusal in findings.refused}
    held = sum(site.parameters for site in findings.sites)
    return _described(folder, model, findings.sites, refused, held, verified=True)


def _described(folder: str, model: nn.Module, sites: list, refused: dict[str, str], held: int, verified: bool) -> dict:
    if not sites and not refused:
        raise ValueError(f"no routed experts were found in {folder}: it looks dense")
    return {
        "model": folder,
        "encoded": False,
        "verified": verified,
        "sites": [site.as_dict() for site in sites],
        "refused": refused,
        "expert_share": held / sum(parameter.numel() for parameter in model.parameters()),
    }


def show(outcome: dict) -> str:
    """Sites as a table, then sizes or refusals."""
    rows = [
        f"{site['path']}: {site['experts']} experts, top {site['top_k']}, {site['hidden']} → {site['inner']} → {site['out']}, "
        f"{site['activation']}, {site['dtype']}{', biases' if site['layout']['up_biases'] else ''}"
        f"{', transposed' if site['layout']['ups'][0]['transposed'] else ''}{_order(site['layout']['order'])}"
        f"{', router ' + site['router'] if site.get('router') else ''}"
        for site in outcome["sites"]
    ]
    if not outcome["encoded"]:
        word = "verified" if outcome["verified"] else "found (--verify checks them by value)"
        rows.append(f"{len(outcome['sites'])} sites {word}, {outcome['expert_share']:.1%} of all parameters")
        return "\n".join(rows + [f"refused: {path}: {reason}" for path, reason in outcome["refused"].items()])
    rows.append(f"{outcome['hashes']} tensors have the bytes that were written")
    rows.append(
        f"complete; group size {outcome['group_size']}, {outcome['scale_mode']} scales, planes {outcome['k_min']} to "
        f"{outcome['k_max']}, default budget {outcome['default_budget']:g} per {outcome['budget_scope']}"
    )
    rows.append(_spending(outcome))
    rows += [
        f"k={row['k']}: {row['bits_per_weight']:.3f} bits per expert weight, {row['bytes']:,} bytes to read"
        for row in outcome["planes"]
    ]
    rows += [f"no calibration token reached {path}: experts {ids}" for path, ids in outcome["unreached"].items()]
    return "\n".join(rows)


def _spending(outcome: dict) -> str:
    known = "are there" if outcome["sensitivities"] else "were not measured"
    named = f"; preset {outcome['preset']}" if outcome["preset"] else ""
    return (
        f"allocator {outcome['allocator']}, experts {'may be' if outcome['skip'] else 'are not'} skipped, sensitivities of "
        f"layers {known}{named}"
    )


def _order(order: str) -> str:
    return "" if order == "rows" else f", gate and up {order}"
