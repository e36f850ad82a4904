"""Do all threads of a program take the same branches? Read in the PTX of a compiled kernel.

A sum over lanes has each lane add its neighbour's number to its own. Where its own number is a product, the compiler
may make one operation of product and sum, which rounds once; the neighbour's product was rounded before. So the two
lanes may end with sums that differ in the last bit. Triton takes such a sum for one number. A loop whose end follows
from it may then end earlier for some threads than for others, and the program waits at the next barrier forever.

`branches(ptx)` lists the branches that depend on such a sum. For each register it keeps the bits of a lane's number
that matter: a step of a sum or of a maximum over lanes makes the two lanes of a pair equal again. What is written to
memory and read again counts as one number, and so does what a warp agrees on by a vote.
"""
import re
from collections import Counter

BITS = frozenset((1, 2, 4, 8, 16))  # of the number of a lane
REGISTER = re.compile(r"%(?!tid|ntid|ctaid|nctaid|laneid)\w+")
INSTRUCTION = re.compile(r"^\s*(?:@!?(%\w+)\s+)?([a-z]\w*(?:[.:]\w+)*)\b([^;]*);", re.M)
TARGET = re.compile(r"\s*(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*,?")
SYMMETRIC = "add", "mul", "min", "max", "and", "or", "xor"  # of two numbers, in whichever order
SILENT = "st", "red", "bar", "cp", "fence", "membar"        # write no register
LEAVE = "bra", "brx", "ret", "exit"
PRODUCT = re.compile(r"mul\.(?!rn).*\bb?f(16|32|64)")
FUSED = re.compile(r"(fma|mad)\..*\bb?f(16|32|64)")          # of whole numbers it does not round


def instructions(ptx: str) -> list: # (predicate or None, operation, registers that are written, those it reads)
    found = []
    for predicate, operation, rest in INSTRUCTION.findall(ptx):
        silent = operation.split(".")[0] in (*SILENT, *LEAVE)
        target = None if silent else TARGET.match(rest)
        read = rest[target.end():] if target else rest
        found.append((predicate or None, operation, REGISTER.findall(target[1]) if target else [],
                      REGISTER.findall(read)))
    return found


def copies(code: list) -> dict: # register -> the one whose number, or half of it, it has
    same, times = {}, Counter(x for *_, to, _ in code for x in to)
    for _, operation, to, given in code:
        if re.match(r"mov\.|cvt\.[usb](16|32)\.[usb](16|32)$", operation):
            same.update((x, same.get(given[0], given[0])) for x in to if given and times[x] == 1)
    return same


def branches(ptx: str) -> list: # the predicates of branches that lanes may take differently
    code = instructions(ptx)
    same, pairs = copies(code), {}   # pairs: register -> (whose neighbour's number it has, lane bit)
    own_of = lambda x: same.get(x, x)
    for lane in re.finditer(r"shfl\.sync\.bfly\.b32\s+(%\w+)(?:\|%\w+)?,\s*(%\w+),\s*(\w+),", ptx):
        if not lane[3].startswith("%"): pairs[lane[1]] = own_of(lane[2]), int(lane[3], 0)
    pairs.update((x, pairs[y]) for x, y in same.items() if y in pairs)
    products = {own_of(x) for _, operation, to, _ in code for x in to if PRODUCT.match(operation)}
    differs, before = {}, None
    while before != differs:  # what a loop writes is read before, too
        before = dict(differs)
        for predicate, operation, to, given in code:
            if not to: continue
            name, own = operation.split(".")[0], frozenset().union(*(differs.get(x, ()) for x in (*given, predicate)))
            pair = next((x for x in given if x in pairs), None)
            of, bit = pairs.get(pair, (None, None))
            if name in ("redux", "vote", "match"): own = frozenset()
            elif name == "shfl" and "bfly" not in operation and own: own = BITS
            elif pair and (FUSED.match(operation) or name in ("add", "sub") and of in products): own |= {bit}
            elif pair and name in SYMMETRIC and {own_of(x) for x in given if x != pair} == {of}: own -= {bit}
            for x in to:
                if not own <= differs.get(x, frozenset()): differs[x] = differs.get(x, frozenset()) | own
    return [predicate for predicate, operation, *_ in code
            if predicate in differs and operation.split(".")[0] in (*LEAVE, "bar")]
