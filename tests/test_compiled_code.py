"""`compiled_code` on a few lines of code each, right and wrong."""

from .compiled_code import old_ends, overwritten

LOOPS = """
  %most = arith.maxsi %a, %b : i32
  %r = scf.for %item = %c0_i32 to %end step %c1_i32 iter_args(%levels = %first) -> (i32) : i32 {
    %own = arith.andi %levels, %c15_i32 : i32
    scf.for %c = %c0_i32 to ENDS step %c1_i32 : i32 {
    }
  }
"""
PRODUCT = ("HGMMA.64x64x16.F32 R24, R72, gdesc[UR12], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1")
OTHER = "HGMMA.64x64x16.F32 R24, R80, gdesc[UR12], R24, gsb0"


def listing(*lines):
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;  /* 0x0 */" for i, line in enumerate(lines))


def test_a_loop_ends_at_a_number_of_its_own_tile():
    for end, old in (("%own", []), ("%most", ["%most"]), ("%c16_i32", [])):
        assert old_ends(LOOPS.replace("ENDS", end)) == old


def test_operands_stay_until_their_product_is_waited_for():
    begin, wait = PRODUCT
    write, use = "LOP3.LUT R74, R3, 0x8, RZ, 0xc0, !PT", "FADD R2, R30, R2"
    assert overwritten(listing(begin, write, wait, "EXIT")) == [begin]
    assert overwritten(listing(begin, use, "EXIT")) == [begin]
    assert overwritten(listing(begin, OTHER, wait, write, "EXIT")) == []  # one more may be under way, not this one
    assert overwritten(listing(begin, wait, write, "EXIT")) == [begin]
    for other in ("LDS.128 R72, [R2]", "LOP3.LUT P0, R73, R3, 0x1, RZ, 0xc0, !PT", "LDSM.16.M88.4 R70, [R2]"):
        assert overwritten(listing(begin, other, "EXIT")) == [begin]
    assert overwritten(listing(begin, "LDS.64 R70, [R2]", "STS [R72], R2", "EXIT")) == []


def test_a_way_back_to_the_beginning_of_a_loop_is_gone_too():
    begin, wait = PRODUCT
    code = ("LOP3.LUT R72, R3, 0x8, RZ, 0xc0, !PT", begin, "@P0 BRA 0x0", wait.replace("0x1", "0x0"), "EXIT")
    assert overwritten(listing(*code)) == [begin]
    assert overwritten(listing(code[0], begin, code[3], code[2], "EXIT")) == []
