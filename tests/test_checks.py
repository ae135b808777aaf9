"""What ops refuse, said in one sentence, and what they take."""

import pytest
import torch

from dpamoe.kernels import checks

IDS = torch.zeros(5, 3, dtype=torch.int64)
GATES, TABLE = torch.ones(5, 3), torch.zeros(4, 9)

REFUSED = {
    "gates of other tokens": (checks.check_pairs, (IDS,), {"gates": GATES[:4]}, "gates [4, 3] and expert_ids [5, 3]"),
    "no slots": (checks.check_pairs, (IDS[0],), {"gates": GATES[0]}, "[tokens, active experts]"),
    "more planes than there are": (checks.check_chunks, (IDS + 9, [None] * 8), {}, "chunks run from 9 to 9"),
    "planes below none": (checks.check_chunks, (IDS - 1, [None] * 8), {}, "use 0 to 8"),
    "another activation": (checks.check_activation, ("swish",), {}, "'swish' is not fused: use one of"),
    "a row for all experts": (checks.check_table, (GATES, IDS, TABLE[0], 2), {}, "residuals [9] must be [experts, k_max + 1]"),
    "a least k beyond the table": (checks.check_table, (GATES, IDS, TABLE, 9), {}, "k_min (9)"),
    "thresholds for all experts": (checks.check_thresholds, (GATES, IDS, TABLE[0], 0), {}, "must be [experts, planes]"),
    "fewer planes than none": (checks.check_thresholds, (GATES, IDS, TABLE, -1), {}, "k_min is -1"),
    "more planes at least than all": (checks.check_thresholds, (GATES, IDS, TABLE, 10), {}, "hand out 0 to 9 planes"),
    "too few counts": (checks.check_spent, (torch.zeros(8), 9), {}, "spent [8] must be [9]"),
    "counts with gaps": (checks.check_spent, (torch.zeros(18)[::2], 9), {}, "spent [9] with gaps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check, given, named, words = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        check(*given, **named)
    assert words in str(caught.value)


def test_taken():
    checks.check_pairs(IDS, gates=GATES, chunks=IDS)
    checks.check_chunks(IDS + 8, [None] * 8)
    checks.check_chunks(IDS[:0] + 9, [None] * 8)  # nobody asks for any
    checks.check_activation("silu_mul")
    checks.check_table(GATES, IDS, TABLE, 0)
    checks.check_thresholds(GATES, IDS, TABLE, 0)
    checks.check_thresholds(GATES, IDS, TABLE, 9)
    checks.check_spent(None, 9)
    checks.check_spent(torch.zeros(9), 9)
