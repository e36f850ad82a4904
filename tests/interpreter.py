"""Triton's interpreter, quicker: it makes types, shapes and the language anew for each operation, and works out whether
integers overflow without telling. Kernels compute what they computed before."""
import functools
import inspect
import math

import numpy as np


def patch():
    "Patch the interpreter that Python has imported, if it is of a version whose inside is known."
    import triton
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."): return
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # what it finds needs `debug` to be told
    interpreter._get_np_dtype = dtype_by_name(interpreter._get_np_dtype)
    interpreter._patch_builtin = give_semantic(interpreter.interpreter_semantic, core.is_builtin)
    core.dtype.__eq__ = identical_first(core.dtype.__eq__)
    semantic.TritonSemantic.computation_type_impl = functools.cache(semantic.TritonSemantic.computation_type_impl)
    semantic.TritonSemantic.binary_op_type_checking_impl = fit_by_type(
        interpreter, core.tensor, semantic.TritonSemantic.binary_op_type_checking_impl)
    core._unwrap_if_constexpr = tensors_first(core.tensor, core._unwrap_if_constexpr)
    core.dtype.is_int = kinds(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    share_shapes(core)
    prepare_once_a_launch(interpreter)


def dtype_by_name(make):
    "NumPy's type for one of Triton's, looked up by its name."
    known = {}

    def dtype(of):
        scalar = of.scalar
        if scalar.name not in known: known[scalar.name] = make(scalar)
        return known[scalar.name]
    return dtype


def identical_first(equal):
    "Most types that are compared are one and the same."
    return lambda self, other: self is other or equal(self, other)


def tensors_first(tensor, unwrap):
    "Most of what is unwrapped is a tensor, and stays as it is."
    return lambda x: x if type(x) is tensor else unwrap(x)


def give_semantic(semantic, is_builtin):
    "The functions of a part of the language, looked for once, are given the interpreter's semantic."
    known = {}

    def given(member):
        inner = getattr(member, "__wrapped__", member)  # what is around it only asks whether there is a semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)
        return call

    def patch_builtin(part, builder, scope):
        if part not in known:
            known[part] = [(name, given(x)) for name, x in inspect.getmembers(part) if is_builtin(x)]
        for name, call in known[part]: scope.set_attr(part, name, call)
    return patch_builtin


def kinds(names):
    "Whether a type is one of those of `names`."
    names = frozenset(names)
    return lambda self: self.name in names


def fit_by_type(interpreter, tensor, fit):
    """What becomes of two operands depends on their types and on a number's value, and is known from the time before:
    the types that they take, and the tensor that a number becomes beside a tensor that stays as it is."""
    types, constants, handle = {}, {}, interpreter.TensorHandle

    def become(self, x, wanted):
        "`x` of the scalar type and the shape of `wanted`"
        if x.type.name == wanted.name: return x
        if x.type.scalar != wanted.scalar: x = self.cast(x, wanted.scalar)
        if x.type.name == wanted.name: return x
        data = x.handle.data
        wide = np.broadcast_to(data, wanted.shape) if x.type.is_block() else np.full(wanted.shape, data, data.dtype)
        return tensor(handle(wide, x.handle.dtype.scalar), wanted)

    def fit_again(self, lhs, rhs, *flags, **named):
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if named or not (left or right): return fit(self, lhs, rhs, *flags, **named)
        if left and right:
            key = lhs.type.name, rhs.type.name, flags
            if key not in types:
                fitted = fit(self, lhs, rhs, *flags)
                types[key] = fitted[0].type, fitted[1].type
                return fitted
            return become(self, lhs, types[key][0]), become(self, rhs, types[key][1])
        stays, number = (lhs, rhs) if left else (rhs, lhs)
        if type(number) not in (int, float, bool): return fit(self, lhs, rhs, *flags)
        key = left, stays.type.name, type(number), number, flags
        if key not in constants:
            fitted = fit(self, lhs, rhs, *flags)
            if fitted[1 - left] is stays:
                constants[key] = fitted[left]
                constants[key].handle.data.flags.writeable = False  # of all that follow
            return fitted
        return (lhs, constants[key]) if left else (constants[key], rhs)
    return fit_again


def share_shapes(core):
    "Tensors and blocks of the same sizes share one shape, which is checked once."
    make_block, equal, blocks = core.block_type.__init__, core.tuple.__eq__, {}

    @functools.cache
    def shape_of(sizes): return core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(math.prod(sizes))

    def new_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    def new_block(self, element_ty, shape):
        key = element_ty.name, *(n.value if isinstance(n, core.constexpr) else n for n in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, blocks[key]

    def same(self, other):
        if isinstance(other, core.tuple): return core.constexpr(self.values == other.values)
        return core.constexpr(self.values == other) if isinstance(other, list) else equal(self, other)

    core.tensor.__init__, core.block_type.__init__, core.tuple.__eq__ = new_tensor, new_block, same


def prepare_once_a_launch(interpreter):
    """The language is prepared for a function that a kernel calls, which takes a third of the interpreter's time: once
    a launch, for all functions that see the same of it."""
    prepared, launch, tl = set(), interpreter.GridExecutor.__call__, interpreter.tl

    @functools.cache
    def seen(fn): return tl in (own := [x for x in fn.__globals__.values() if inspect.ismodule(x)]), tl.core in own

    def launch_afresh(self, *args, **kwargs):
        prepared.clear()
        prepared.add(seen(self.fn))
        return launch(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        if seen(self.fn) not in prepared: interpreter._patch_lang(self.fn)
        prepared.add(seen(self.fn))
        try: return self.rewrite()(*args, **kwargs)
        except Exception as error: raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launch_afresh, call
