"""Do all threads of a program take the same branches? Read in the PTX of a compiled kernel.

A sum over lanes has each lane add its neighbour's number to its own. Where its own number is a product, the compiler
makes one operation of product and sum, which rounds once; the neighbour's product was rounded before. So the two lanes
may end with sums that differ in the last bit. Triton takes such a sum for one number. A loop whose end follows from it
may then end earlier for some threads than for others, and the program waits at the next barrier forever.

`branches(ptx)` lists the branches that depend on such a sum. For each register it keeps the bits of a lane's number
that matter: a step of a sum or of a maximum over lanes makes the two lanes of a pair equal again.
"""
import re

BITS = frozenset((1, 2, 4, 8, 16))  # of the number of a lane
MEMORY = "ld", "st", "red.", "cp", "bar", "atom", "wgmma", "mma", "ldmatrix", "stmatrix"
REGISTER = re.compile(r"%(?!tid|ntid|ctaid|nctaid|laneid)\w+")
INSTRUCTION = re.compile(r"^\s*(?:@!?(%\w+)\s+)?([a-z]\w*(?:[.:]\w+)*)\s+(.*?);", re.M)
PAIR = re.compile(r"shfl\.sync\.bfly\.b32\s+(%\w+),\s*(%\w+),\s*(\d+),")


def instructions(ptx: str) -> list: # (predicate or None, operation, register that is written or None, those it reads)
    "Without those of memory: a place holds one number."
    found = []
    for predicate, operation, rest in INSTRUCTION.findall(ptx):
        if operation.startswith(MEMORY): continue
        named = REGISTER.findall(rest)
        writes = named and not operation.startswith("bra")
        found.append((predicate or None, operation, named[0] if writes else None, named[bool(writes):]))
    return found


def branches(ptx: str) -> list: # the predicates of branches that lanes may take differently
    code, pairs = instructions(ptx), {to: (own, int(bit)) for to, own, bit in PAIR.findall(ptx)}
    products = {to for _, operation, to, _ in code if operation.startswith("mul.") and ".rn" not in operation}
    products &= {to for _, operation, to, _ in code if ".f32" in operation}
    differs, before = {}, None
    while before != differs:  # what a loop writes is read before, too
        before = dict(differs)
        for predicate, operation, to, given in code:
            if to is None: continue
            own = frozenset().union(*(differs.get(x, ()) for x in (*given, predicate)))
            pair = next((x for x in given if x in pairs), None)
            if operation.startswith("redux"): own = frozenset()
            elif operation.startswith("shfl.sync.idx") and own: own = BITS
            elif pair is not None:
                of, bit = pairs[pair]
                if operation.startswith("fma") or of in products: own |= {bit}
                elif of in given: own -= {bit}  # both lanes of a pair find the same
            if not own <= differs.get(to, frozenset()): differs[to] = differs.get(to, frozenset()) | own
    return [predicate for predicate, operation, *_ in code if operation.startswith("bra") and predicate in differs]
