"""Name how a router chooses: which scores it gives, and how it selects from them."""

from torch import fx

from dpamoe.passes.experts import name_of
from dpamoe.passes.record import Recording

SELECTIONS = ("topk", "sort", "argsort", "argmax", "max", "multinomial")
SCORES = {"_softmax": "softmax", "sigmoid": "sigmoid", "softplus": "softplus"}
FARTHEST = 400  # nodes looked at: a router stands right before its experts, softmax attention farther away


def router_kind(recording: Recording, index: fx.Node, weights: fx.Node) -> str:
    """Such as "softmax, topk"; "table" where experts are looked up by token id, "unknown" for what is not recognised."""
    selection = _nearest(recording, index, {name: name for name in SELECTIONS})
    score = _nearest(recording, weights, SCORES)
    if selection is None:
        looked_up = _nearest(recording, index, {"embedding": "table", "index": "table", "index_select": "table"})
        selection = looked_up or "unknown"
    return ", ".join(part for part in (score, selection) if part)


def _nearest(recording: Recording, node: fx.Node, wanted: dict[str, str]) -> str | None:
    """What the nearest ancestor of a wanted kind is called, breadth first; None if none is near."""
    seen, level, looked = {node}, [node], 0
    while level and looked < FARTHEST:
        following = []
        for current in level:
            looked += 1
            if name_of(current) in wanted:
                return wanted[name_of(current)]
            following += [source for source in recording.inputs_of(current) if source not in seen]
            seen.update(following)
        level = following
    return None
