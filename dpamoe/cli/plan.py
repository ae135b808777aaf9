"""`dpamoe plan`: how many planes of a model fit into a memory, before anything is loaded."""

from dpamoe.checkpoint import is_encoded
from dpamoe.cli.options import encode_changes, encode_flags, encode_spec, positive, preset_flag, size
from dpamoe.plan import costs_of, plan
from dpamoe.presets import DEFAULT, preset_of

NAME = "plan"
HELP = "say how many planes of an encoded or original model fit into a memory, and what a token then reads"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an encoded or original model folder")
    parser.add_argument("--memory", type=size, required=True, help="memory of the device, such as 24GiB")
    parser.add_argument("--context", type=positive, required=True, help="tokens of a sequence that the cache holds")
    parser.add_argument("--batch", type=positive, default=1, help="sequences at once")
    parser.add_argument(
        "--margin", type=size, help="memory to leave free; default: 512MiB and what a prompt of that length needs"
    )
    preset_flag(parser)
    encode_flags(parser)


def run(args) -> dict:
    """Read config and headers, and count."""
    if is_encoded(args.model) and (args.preset or encode_changes(args)):
        raise ValueError(f"{args.model} is encoded already: leave --preset and the encoding flags out")
    costs = costs_of(args.model, encode_spec(args), preset_of(args.preset or DEFAULT).spend)
    found = plan(costs, args.memory, args.context, args.batch, args.margin)
    method = {"group_size": costs.spec.group_size, "scale_mode": costs.spec.scale_mode}
    return {"model": args.model, **method, **found, "failed": found["k_max"] is None}


def show(outcome: dict) -> str:
    """The answer, what it is made of, and a row for each k."""
    bound = "" if outcome["cache_exact"] else " (an upper bound from the config: the model did not run without weights)"
    encoded = (
        "" if outcome["encoded"] else f" once encoded (group size {outcome['group_size']}, {outcome['scale_mode']} scales)"
    )
    lines = [
        _answer(outcome),
        f"{_size(outcome['other_bytes'])} for all but expert weights, {_size(outcome['cache_bytes'])} cache for "
        f"{outcome['batch']} × {outcome['context']:,} tokens{bound}, {_size(outcome['margin_bytes'])} working space{encoded}",
        "  k  bits per expert weight     weights   with cache and working space   expert weights a token reads",
    ]
    lines += [
        f"{row['k']:3}  {row['bits_per_weight']:22.3f}  {_size(row['weight_bytes']):>10}  {_size(row['total_bytes']):>18} "
        f"{'fits' if row['fits'] else 'too much':>10}  {_size(row['expert_bytes_per_token']):>28}"
        for row in outcome["rows"]
    ]
    return "\n".join(lines)


def _answer(outcome: dict) -> str:
    memory, k_max = _size(outcome["memory"]), outcome["k_max"]
    if k_max is None:
        least = outcome["rows"][0]
        return (
            f"nothing of {outcome['model']} fits into {memory}: with the fewest planes, {least['k']}, it needs "
            f"{_size(least['total_bytes'])}; shorten the context, or spread the model over devices"
        )
    read = outcome["expert_bytes_per_token"] + outcome["other_bytes_per_token"]
    load = f"k_max={k_max}" if outcome["encoded"] else f"--k-max {k_max} or more, then k_max={k_max}"
    return (
        f"{load} fits into {memory}, with budgets from {outcome['least']} to {k_max}; at budget {outcome['budget']:g} a token "
        f"reads {_size(read)}, cache included, of which {_size(outcome['expert_bytes_per_token'])} are expert weights"
    )


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
