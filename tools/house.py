"""The floors of the package: which room is on which, what it imports, and every import that goes up.

A room is a module. It may import rooms of lower floors, whether at the top of the file or inside a function; of its own
floor only those in `BESIDE`. What two rooms share has a public name in the lower one.
"""
import ast
import sys
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "sparse_nb"
METHODS = ["santa", "vattention", "delta", "saap", "sketch_walk", "baselines", "hash_attention", "patterns", "lsh",
           "eviction"]
HOUSE = [  # floor by floor, from the ground
    ["kernels.common", "kernels.gather", "kernels.host", "kernels.santa", "kernels.vattention", "kernels.blocks",
     "kernels.choose", "kernels.delta", "kernels.exact", "kernels.saap", "kernels.sketch_walk",
     "kernels.sketch_walk_prefill"],
    ["core.checks", "core.streams", "tasks"],
    ["core.exact", "core.bounds"],
    ["core.selection", "core.blocks"],
    ["core.methods", "metrics"],
    [*METHODS, "santa_keys", "compose", "audit", "crossover", "attention"],
    ["models.rotation", "models.cache", "models.override", "models.view", "models.capturing",
     "models.replay"],
    ["hf", "pocket", "witness", "corpus", "plots", "device"],
    ["evaluate", "text", "grid", "bench", "tuning", "saap_training", "claims"],
    ["saap_partition"],
    ["cli", "demo"],
]
BESIDE = {  # room: rooms of its own floor that it may import
    "core.blocks": ["core.selection"],
    "kernels.*": ["kernels.common"],
    "core.streams": ["core.checks"],
    "metrics": ["core.methods"],
    "baselines": ["hash_attention"],
    "santa": ["santa_keys"],
    "compose": METHODS,
    "models.rotation": ["models.override"],
    "models.capturing": ["models.override", "models.rotation"],
    "models.replay": ["models.cache", "models.override"],
    "pocket": ["hf"],
    "witness": ["pocket"],
    "text": ["evaluate"],
    "grid": ["evaluate", "text"],
    "cli": ["demo"],
}
OF_MANY = {  # room: kernels it shares
    "baselines": ["kernels.choose", "kernels.gather"], "hash_attention": ["kernels.choose"],
    "eviction": ["kernels.gather"]}
FORBIDDEN = [  # rooms, and rooms below that they must not import
    (["bench", "rivals"], [*METHODS, "compose"]),
    (["core.checks", "core.streams", "core.exact", "core.bounds", "core.methods", "metrics", "tasks", "attention",
      "compose", "models.*", "hf", "pocket", "witness",
      "corpus", "plots", "evaluate", "text", "grid", "bench", "rivals", "tuning", "saap_training",
      "claims"], ["kernels.*"]),
]
NEEDS = {"kernels.*": {"torch", "triton"}}  # room: all that it may import from elsewhere, the standard library aside
DOORS = {"attention"}                       # rooms that hold imports and nothing else


def matches(room, patterns): return any(fnmatch(room, pattern) for pattern in patterns)


def floor_of(room):
    "The number of the room's floor, None for a room that is not in the table."
    return next((number for number, rooms in enumerate(HOUSE) if matches(room, rooms)
                 and not room.endswith("__init__")), None)


def rooms_of(root):
    "The modules of the package below `root`: name without the package's, and file; packages end in `__init__`."
    folder = root / PACKAGE
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(folder.rglob("*.py"))
            if path.stem != "_modidx"}


def imports_of(room, tree, rooms):
    """Imports in the room's syntax tree: line, module, name of what is taken from it (or None), and name that stands
    for a module here (or None)."""
    absolute = lambda module: module[len(PACKAGE):].lstrip(".") if module.split(".")[0] == PACKAGE else None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for x in node.names: yield node.lineno, absolute(x.name), x.name, None, x.asname or x.name
        elif isinstance(node, ast.ImportFrom):
            whole = ".".join([*room.split(".")[:-node.level],
                              *filter(None, [node.module])]) if node.level else absolute(node.module)
            for x in node.names:
                inner = None if whole is None else f"{whole}.{x.name}".lstrip(".")
                if inner in rooms or f"{inner}.__init__" in rooms:
                    yield node.lineno, inner, node.module, None, x.asname or x.name
                else: yield node.lineno, whole, node.module, x.name, None


def allowed(room, other):
    "May `room` import `other`? Both are in the table."
    if any(matches(room, rooms) and matches(other, others) for rooms, others in FORBIDDEN): return False
    if other.startswith("kernels.") and room in METHODS and other not in (
            "kernels.common", f"kernels.{room}", f"kernels.{room}_prefill", *OF_MANY.get(room, [])):
        return False
    if floor_of(room) == floor_of(other):
        return matches(other, [x for pattern, rooms in BESIDE.items() if fnmatch(room, pattern) for x in rooms])
    return floor_of(other) < floor_of(room)


def private(name): return name.startswith("_") and not name.endswith("__")


def faults(root):
    "What is wrong with the house below `root`, a line for each."
    rooms, graph = rooms_of(root), {}
    for room, path in rooms.items():
        tree, modules, found = ast.parse(path.read_text(encoding="utf-8")), {}, {}
        is_package = room.split(".")[-1] == "__init__"
        needs = [more for pattern, more in NEEDS.items() if fnmatch(room, pattern)]
        if floor_of(room) is None and not is_package: found[f"{room} is on no floor"] = 1
        for line, other, outside, name, alias in imports_of(room, tree, rooms):
            if alias: modules[alias] = other
            if other is None:
                top = outside.split(".")[0]
                if needs and top not in needs[0] | set(sys.stdlib_module_names):
                    found.setdefault(f"{room} imports {top}", line)
            elif other:  # the package itself holds nothing but its version
                graph.setdefault(room, set()).add(other)
                if name and private(name): found[f"{room} imports the private {other}.{name}"] = line
                if is_package: found[f"{room} imports {other}, a package imports nothing"] = line
                elif other not in rooms: found[f"{room} imports {other}, which is no room"] = line
                elif None not in (floor_of(room), floor_of(other)) and not allowed(room, other):
                    found.setdefault(f"{room}, on floor {floor_of(room)}, imports {other}, on floor {floor_of(other)}",
                                     line)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr) and modules.get(ast.unparse(node.value)):
                found[f"{room} uses the private {modules[ast.unparse(node.value)]}.{node.attr}"] = node.lineno
            if room in DOORS and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[f"{room} is a door, {node.name} belongs to a room"] = node.lineno
        yield from (f"{path.relative_to(root)}:{line}: {what}" for what, line in found.items())
    try: [*TopologicalSorter(graph).static_order()]
    except CycleError as error: yield f"a circle: {' imports '.join(reversed(error.args[1]))}"


def show(root):
    "Print the floors from the top: each room, its lines, and what it imports."
    rooms = rooms_of(root)
    for number, names in reversed([*enumerate(HOUSE)]):
        print(f"\nfloor {number}")
        for room in [room for pattern in names for room in rooms if fnmatch(room, pattern) and floor_of(room)
                     == number]:
            text = rooms[room].read_text(encoding="utf-8")
            others = {other for _, other, *_ in imports_of(room, ast.parse(text), rooms) if other in rooms}
            print(f"  {room:22}{len(text.splitlines()):5} lines  "
                  f"{' '.join(sorted(others, key=lambda x: (floor_of(x) or 0, x)))}")
    for line in faults(root): print(line)


if __name__ == "__main__": show(Path(__file__).parents[1])
