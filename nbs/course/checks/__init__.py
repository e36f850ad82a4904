"""What the checks of the labs share.

A check runs the student's function on inputs whose answer is known. It prints "right", or "not yet" and what is wrong.
"""
import functools
import re
import traceback
import warnings

import torch


class NotYet(Exception):
    "What a check says of an answer that is not right yet."


def need(holds, message):
    "Go on if `holds`; otherwise the check ends with `message`."
    if not holds: raise NotYet(message)


def where(error):
    "The line at which the student's code stopped, in words."
    ours = re.compile(r"site-packages|[/\\]checks[/\\]")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not ours.search(frame.filename)]
    return f" at `{frames[0].line}`" if frames and frames[0].line else ""


def check(test):
    """A check from a function that is given the student's answer: it raises NotYet, or returns a sentence to print
    behind "right", or None."""
    @functools.wraps(test)
    def run(*answers):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = test(*answers)
        except NotYet as why: print(f"not yet: {why}")
        except Exception as error: print(f"not yet: the code stopped{where(error)}: {type(error).__name__}: {error}")
        else: print("right" + (f": {said}" if said else ""))
    return run


def result(function, *given):
    "What the student's function returns for these arguments; nothing is not an answer."
    got = function(*given)
    need(got is not None, f"{function.__name__} returns nothing yet")
    return got


def parts(got, count, names):
    "A tuple of `count` things that the student's function returned."
    many = isinstance(got, (tuple, list)) or getattr(got, "ndim", 0)  # an array may hold them, too
    need(many and len(got) == count, f"return {count} things: {names}")
    return got


def number(x): return torch.as_tensor(x).detach().to(torch.float64)


def close(got, want, tolerance=1e-5):
    "Do two arrays of one shape agree, relative to the length of the second?"
    got, want = number(got), number(want)
    return got.shape == want.shape and bool((got - want).norm() <= tolerance * want.norm().clamp(min=1e-12))


def same(got, want, what, known=None, tolerance=1e-5):
    """Go on if `got` agrees with `want`; otherwise say what is wrong.

    `known` holds typical mistakes: what to say of each -> what one gets by it.
    """
    try: got = number(got)
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"{what} must be a number or a tensor, got {type(got).__name__}") from None
    want = number(want)
    if got.shape != want.shape and got.numel() == want.numel() == 1: got = got.reshape(want.shape)
    need(got.shape == want.shape, f"{what} has the shape {list(got.shape)}, expected is {list(want.shape)}")
    if close(got, want, tolerance): return
    for message, wrong in (known or {}).items(): need(not close(got, wrong, tolerance), message)
    need(bool(got.isfinite().all()), f"{what} has entries that are not finite numbers")
    if want.numel() <= 6: raise NotYet(f"{what} is {said(got)}, expected is {said(want)}")
    error = float((got - want).norm() / want.norm())
    raise NotYet(f"{what} is off by {error:.2g} of its length")


def said(x):
    "A few numbers, short."
    found = [float(f"{y:.4g}") for y in x.flatten().tolist()]
    return found[0] if x.ndim == 0 else found
