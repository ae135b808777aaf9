"""What compilers of a kernel may do wrong without a word, seen in their code: loops that end at old numbers, operands lost."""

import re

LOOP = re.compile(r"scf\.for %\w+ = %[\w#]+ to (%\w+)")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.F32 R(\d+), (?:R(\d+)|gdesc)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
NO_RESULT = re.compile(r"ST|BAR|BRA|SYNCS|WARP|EXIT|DEP|RED|ISETP|FSETP|U|R2UR|NOP|CALL|RET|BSYNC|BSSY|LDG[SD]|ARRIVES")


def faults_of(ttgir, listing):
    """All of them, in Triton's code in its last dialect and in SASS."""
    return [f"a loop ends at {end}" for end in old_ends(ttgir)] + [f"not waited for: {text}" for text in overwritten(listing)]


def old_ends(ttgir):
    """Ends of loops in loops that are the same each time, though no constants."""
    found, loops, known = [], [], {}
    for number, line in enumerate(ttgir.splitlines()):
        depth = len(line) - len(line.lstrip())
        while loops and depth <= loops[-1][0]:
            loops.pop()
        if result := re.match(r"\s*(%\w+)(?::\d+)? = ", line):
            known[result[1]] = number
        if loop := LOOP.search(line):
            if loops and not re.match(r"%c-?\d+_i32", loop[1]) and known.get(loop[1], -1) < loops[0][1]:
                found.append(loop[1])
            loops.append((depth, number))
    return found


def overwritten(listing):
    """Products of a warp group in SASS of which an operand in registers may change, or sums be used, before they are done."""
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", listing)]
    places = {at: place for place, (at, _) in enumerate(code)}
    found = []
    for place, (_, text) in enumerate(code):
        if product := PRODUCT.search(text):
            width, sums, left = int(product[1]), int(product[2]), product[3]
            kept = set(range(int(left), int(left) + 4)) if left else set()
            held = set(range(sums, sums + width // 2))
            if _meets(code, places, place, kept, held):
                found.append(text)
    return found


def _meets(code, places, product, kept, held):
    """Whether an instruction writes `kept` or takes `held` on a way from a product to where that is waited for."""
    seen, ways = set(), [(product + 1, 0 if "gsb0" in code[product][1] else -1)]
    while ways:
        place, after = ways.pop()  # after: groups of products behind its own
        while place < len(code) and (place, after) not in seen:
            seen.add((place, after))
            text = code[place][1]
            if (wait := WAIT.search(text)) and after >= int(wait[1]):
                break
            if "HGMMA" in text:
                after = min(after + ("gsb0" in text), 8)
            elif _written(text) & (kept | held) or {int(r) for r in re.findall(r"\bR(\d+)\b", text)} & held:
                return True
            branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
            if branch and int(branch[1], 16) in places:
                ways.append((places[int(branch[1], 16)], after))
            if re.match(r"BRA|EXIT", text):
                break
            place += 1
    return False


def _written(text):
    """Registers that an instruction writes."""
    name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    first = re.match(r"\s*(?:U?P(?:\d+|T),\s*)*R(\d+)\b", operands)  # behind the predicates that it writes
    if NO_RESULT.match(name) or not first:
        return set()
    matrices = re.match(r"LDSM\..*\.M88\.(\d)", name)
    wide = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name or name.startswith("CS2R") else 1
    size = int(matrices[1]) if matrices else wide
    return set(range(int(first[1]), int(first[1]) + size))
