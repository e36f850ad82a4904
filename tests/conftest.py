"""What all tests share: one torch thread and one heap a process, models that are loaded once, and the processor time of
each test."""
import gc
import io
import multiprocessing
import os
import re
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes side by side fight for the cores otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # before transformers: no test needs the network
# of the processes started from here: memory that a tensor gave back is kept, not asked of the system again for the next
for name, kept in {"MALLOC_MMAP_THRESHOLD_": 2**32, "MALLOC_TRIM_THRESHOLD_": 2**33}.items():
    os.environ.setdefault(name, str(kept))

import pytest
import torch
import changed
from covering import covering

from benchmarks import recorder
from sparse_nb.device import kernel_device

# a share of the tests of the kernels, as one test of those without
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreter
SECONDS = 8  # of processor time, children counted, that a test without the mark `budget` may take
SPREAD = 2  # times as long the same test takes beside other work; over its time it is named, over so many it fails
PIECE = 0.06  # of it, that `slowness` takes for a piece of work on the machine whose seconds these are


# the time of each test

USED = pytest.StashKey[dict]()


ELSEWHERE = []  # seconds of the processes of `started`, which are no children of this one


def processor_seconds():
    "What this process, the children that it has waited for and the processes of `started` have used."
    return sum(os.times()[:4]) + sum(ELSEWHERE)


def slowness():
    "Times as long as there that this machine takes now, at least 1: the middle of five pieces of work."
    taken = []
    for _ in range(5):
        before = time.process_time()
        sum(i * i % 7 for i in range(10**6))
        x, far = torch.ones(256, 256), torch.zeros(2**21)
        for _ in range(40): x = (x @ x).tanh()
        for _ in range(8): far += 1
        taken.append(time.process_time() - before)
    return max(1, sorted(taken)[2] / PIECE)


def spent(item):
    "Processor time of a test and of what is made for it alone, and how much it may take."
    used, mark = item.stash[USED], item.get_closest_marker("budget")
    return sum(used.get(kind, 0) for kind in ("fixtures", "call")), mark.args[0] if mark else SECONDS


def timed(item, kind):
    "Add the processor time of what follows to that of `item`."
    before = processor_seconds()
    try: return (yield)
    finally:
        used = item.stash.setdefault(USED, {})
        used[kind] = used.get(kind, 0) + processor_seconds() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item): return (yield from timed(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    own = fixturedef.scope == "function"  # those of wider scope are made for many tests
    return (yield from timed(request.node, "fixtures")) if own else (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield from timed(item, "call")
    own, allowed = spent(item)
    busy = os.getloadavg()[0] > 2 * os.cpu_count()  # then the same work takes up to twice the processor time
    unlimited = busy or INTERPRETED or any(map(item.get_closest_marker, ("slow", "gpu")))
    if own > allowed and not unlimited:
        said = f"{own:.1f} s of processor time, {item.name} may take {allowed} s"
        item.user_properties.append(("over", said))
        if own > SPREAD * allowed * slowness(): pytest.fail(said, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    try: return (yield from timed(item, "teardown"))
    finally:
        used = item.stash[USED]
        item.user_properties.append(("processor_seconds", sum(x for kind, x in used.items() if kind != "fixtures")))


def pytest_terminal_summary(terminalreporter):
    files, over = {}, []
    for report in [x for reports in terminalreporter.stats.values() for x in reports]:
        if getattr(report, "when", None) != "teardown": continue
        count, seconds = files.get(report.location[0], (0, 0.0))
        said = dict(report.user_properties)
        files[report.location[0]] = count + 1, seconds + said["processor_seconds"]
        over += [said["over"]] if "over" in said else []
    if not files: return
    terminalreporter.section("processor time, collection not counted")
    files["all"] = tuple(map(sum, zip(*files.values())))
    for name, (count, seconds) in files.items():
        terminalreporter.write_line(f"{seconds:8.1f} s {count:6d} tests  {name}")
    for said in over: terminalreporter.write_line(said)


# a process of its own, without the seconds that its imports take

PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    PROCESSES.set_forkserver_preload(["torch.distributed.tensor", "transformers.models.llama.modeling_llama",
                                      "transformers.models.auto", "scipy.stats", "seaborn"])


def send_result(pipe, function, arguments):
    gc.freeze()  # of what is imported, nothing is garbage
    pipe.send((function(*arguments), processor_seconds()))


def run_pytest(environment, *arguments):
    "Exit code and output of pytest with `arguments`."
    os.environ.update(environment)
    if "TRITON_INTERPRET" in environment:
        kernel_device()  # Triton, which transformers has imported, anew
        for name in "covering", "inputs": sys.modules.pop(name, None)  # they have read the environment that was
    with io.StringIO() as said, redirect_stdout(said), redirect_stderr(said):
        return int(pytest.main([*map(str, arguments)])), said.getvalue()


@pytest.fixture(scope="session")
def started():
    """`started(function, *arguments)` begins a process that has run nothing before, and gives a function that waits for
    what it returns; its time is that of the test or fixture that waits."""
    def start(function, *arguments):
        mine, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=send_result, args=(theirs, function, arguments))
        process.start()
        theirs.close()

        def result():
            try: returned, seconds = mine.recv()
            except EOFError: returned, seconds = None, 0
            process.join()
            ELSEWHERE.append(seconds)
            if not process.exitcode: return returned
            pytest.fail(f"the process of {function.__name__}{arguments} ended with {process.exitcode}", pytrace=False)
        return result
    return start


@pytest.fixture(scope="session")
def forked(started):
    "`forked(function, *arguments)`: what the function returns in a process that has run nothing before."
    return lambda function, *arguments: started(function, *arguments)()


@pytest.fixture(scope="session")
def forked_pytest(forked):
    "`forked_pytest(*arguments, **environment)`: exit code and output of pytest in a process of its own."
    return lambda *arguments, **environment: forked(run_pytest, environment, *arguments)


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch):
    "The small form of a benchmark asks for Triton's interpreter, for the rest of the process: a test's goes without."
    if not INTERPRETED: monkeypatch.setattr(recorder, "kernel_device", lambda: "cpu")


@pytest.fixture(autouse=True)
def compiled(monkeypatch, request):
    "The PTX of the kernels that a test compiles, all of whose threads must take the same branches."
    found = []
    if INTERPRETED or not request.node.get_closest_marker("kernels"): return (yield found)
    import triton
    from uniform import branches
    compile = triton.compile
    def kept(*arguments, **options):
        made = compile(*arguments, **options)
        found.append(made.asm["ptx"])
        return made
    monkeypatch.setattr(triton, "compile", kept)
    yield found
    apart = {re.search(r"\.entry (\w+)", ptx)[1]: those for ptx in found if (those := branches(ptx))}
    assert not apart, f"threads may take different branches: {apart}"


@pytest.fixture(scope="session")
def pocket():
    "The pocket model and its tokenizer, on a GPU if there is one."
    from sparse_nb import pocket
    return pocket.load("cuda" if torch.cuda.is_available() else "cpu")


# the order of tests, and those that Triton's interpreter runs

if INTERPRETED: interpreter.patch()


def pytest_addoption(parser):
    parser.addoption("--shard", default="0/1", metavar="I/N", help="every Nth test, from number I on")
    parser.addoption("--changed", action="store_true",
                     help="what Triton compiles or interprets, and the site, only where a change can break it")
    parser.addoption("--cases", default="all", choices=["all", "covering", "others"],
                     help="covering: of each test only the cases that hold every pair of values of its parameters")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for name in ("smollm2", "qwen", "data"):
        if asked := [item for item in items if item.get_closest_marker(name)]:
            from sparse_nb.models import fetch
            lacking = pytest.mark.skip(reason=f"it is not here: make fetch MODEL={name}")
            if not fetch.is_here(name):
                for item in asked: item.add_marker(lacking)
    if config.getoption("changed"):
        files = changed.changed_files()
        apart = [name for name, broken in (("kernels", changed.kernels), ("site", changed.site)) if not broken(files)]
        unasked = {item for item in items if any(map(item.get_closest_marker, apart))}
        config.hook.pytest_deselected(items=[*unasked])
        items[:] = [item for item in items if item not in unasked]
    forks = {item for item in items if "started" in getattr(item, "fixturenames", ())
             and not item.get_closest_marker("kernels")}
    for item in forks: item.add_marker(pytest.mark.xdist_group("forked"))  # of one process that has imported all
    budget = lambda item: mark.args[0] if (mark := item.get_closest_marker("budget")) else 0
    items.sort(key=lambda item: (item in forks, budget(item)), reverse=True)  # longest first
    if (cases := config.getoption("cases")) != "all":
        functions, parameters = {}, lambda item: item.callspec.params if hasattr(item, "callspec") else {}
        for item in items:
            if not item.get_closest_marker("gpu"): functions.setdefault(item.function, []).append(item)
        chosen = {same[i] for same in functions.values() for i in covering([*map(parameters, same)])}
        items[:] = [item for same in functions.values() for item in same if (item in chosen) == (cases == "covering")]
    first, step = map(int, config.getoption("shard").split("/"))
    items[:] = items[first::step]


def pytest_collection_finish():
    "Of what is imported and collected, nothing is garbage: it is not searched each time that a test collects some."
    gc.collect()
    gc.freeze()
