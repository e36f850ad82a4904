"""Triton's interpreter, quicker: it makes types, shapes and the language anew for each operation, and works out whether
integers overflow without telling. Kernels compute what they computed before."""
import functools
import math


def patch():
    "Patch the interpreter that Python has imported, if it is of a version whose inside is known."
    import triton
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."): return
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # what it finds needs `debug` to be told
    interpreter._get_np_dtype = dtype_by_name(interpreter._get_np_dtype)
    interpreter._patch_attr = give_semantic(interpreter)
    core.dtype.__eq__ = identical_first(core.dtype.__eq__)
    semantic.TritonSemantic.computation_type_impl = functools.cache(semantic.TritonSemantic.computation_type_impl)
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


def give_semantic(interpreter):
    "A function of the language is given the interpreter's semantic, in place of any other."
    def patch_attr(obj, name, member, builder, scope):
        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)
        scope.set_attr(obj, name, call)
    return patch_attr


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
    for each function and launch."""
    prepared, launch = set(), interpreter.GridExecutor.__call__

    def launch_afresh(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        if self.fn not in prepared: interpreter._patch_lang(self.fn)
        prepared.add(self.fn)
        try: return self.rewrite()(*args, **kwargs)
        except Exception as error: raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launch_afresh, call
