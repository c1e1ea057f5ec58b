"""A Mosaic GPU kernel that is lowered once a process, whatever number of programs hold it.

Lowering one takes most of a second of Python, and an engine has the same few kernels in each of its programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
from jax.extend.core import Primitive
from jax.interpreters import mlir

CUSTOM_CALLS = ("mosaic_gpu", "mosaic_gpu_v2")  # which jax.export does not know to be stable


def lowered_once(kernel: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
    """`kernel` with hashable `options`, for programs for CUDA alone. Its result must be like its first argument.

    The work is done when a program is lowered, not when it is traced: one whose executable is there already does without.
    """

    def call(*args: jax.Array | None) -> jax.Array:
        arrays, tree = jax.tree.flatten(args)
        return _kernel.bind(*arrays, kernel=kernel, options=tuple(options.items()), tree=tree)

    return call


_kernel = Primitive("lowered_once")
_kernel.def_abstract_eval(lambda first, *rest, **params: first)


@functools.lru_cache(maxsize=256)
def _export(
    kernel: Callable[..., jax.Array],
    options: tuple[tuple[str, Any], ...],
    tree: jax.tree_util.PyTreeDef,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
) -> jax.export.Exported:
    jitted = jax.jit(functools.partial(kernel, **dict(options)))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALLS]
    return jax.export.export(jitted, platforms=("cuda",), disabled_checks=allowed)(*tree.unflatten(shapes))


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, tree: jax.tree_util.PyTreeDef, **params: Any) -> Any:
    avals: Any = ctx.avals_in
    shapes = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    exported = _export(tree=tree, shapes=shapes, **params)
    call = mlir.lower_fun(lambda *arrays: exported.call(*tree.unflatten(arrays)), multiple_results=False)
    return call(ctx, *values)


mlir.register_lowering(_kernel, _lower, platform="cuda")
