"""Find the names that the modules of a model read from their **kwargs, to refuse others.

A module with **kwargs passes them on to another one, reads single names, or loops over all of them. The source of its
forward shows which. If the annotation of **kwargs is `Unpack` of a TypedDict, its fields are the names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple, get_args, get_type_hints, is_typeddict

import torch

# Arguments that models of transformers pass in **kwargs to attention functions and losses: the fields of its
# TransformersKwargs and FlashAttentionKwargs, parameters of these functions, and arguments of decorators of a forward.
KWARGS_OF_TRANSFORMERS = frozenset(
    "num_items_in_batch output_hidden_states output_attentions output_router_logits cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k position_ids is_causal seq_idx dropout scaling sliding_window softcap position_bias "
    "s_aux deterministic return_dict use_cache cache_position labels shift_labels ignore_index attention_mask".split()
)
LOOPS = (ast.For, ast.comprehension)
READS_ALL = ("items", "keys", "values")  # methods of a dict that return all of its names or values


class ModelKwargs(NamedTuple):
    """Keyword arguments of a model."""

    parameters: frozenset[str]  # of its forward and, if it has **kwargs, of those of its submodules
    has_kwargs: bool  # True if its forward has **kwargs
    read: frozenset[str]  # further names, which the code of modules with **kwargs reads
    reads_any: bool  # True if a module with **kwargs reads all names, or if no code shows what is read


def find_model_kwargs(model: Callable[..., Any]) -> ModelKwargs:
    """Return the keyword arguments of a model, as far as the code of its modules shows them.

    Args:
        model: A module, or a function, which may read any name from its **kwargs.

    Returns:
        The names.
    """
    parameters, has_kwargs = parameter_names(model)
    if not has_kwargs:
        return ModelKwargs(frozenset(parameters), has_kwargs, frozenset(), reads_any=False)
    parameters = parameters.union(KWARGS_OF_TRANSFORMERS, *(parameter_names(m)[0] for m in _modules_of(model)))
    if not isinstance(model, torch.nn.Module):
        return ModelKwargs(frozenset(parameters), has_kwargs, frozenset(), reads_any=True)
    reads = [_read_from_kwargs(module) for module in _modules_of(model) if parameter_names(module)[1]]
    names = frozenset[str]().union(*(names for names in reads if names is not None))
    return ModelKwargs(frozenset(parameters), has_kwargs, names, reads_any=None in reads)


def parameter_names(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of the parameters of a function or of a module's forward, and True if it has **kwargs.

    Args:
        function: The function or module.

    Returns:
        The names, and the flag.
    """
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return set(), False
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _modules_of(model: Callable[..., Any]) -> Iterator[torch.nn.Module]:
    """Yield a model's module and submodules; for a function, those of the modules that it reads from outer scopes.

    Of those with the same forward only one.
    """
    values: list[Any] = [model]
    if inspect.isfunction(model):
        variables = inspect.getclosurevars(model)
        values = [*variables.nonlocals.values(), *variables.globals.values()]
    modules = [module for value in values if isinstance(value, torch.nn.Module) for module in value.modules()]
    yield from {(type(module), vars(module).get("forward")): module for module in modules}.values()


def _read_from_kwargs(module: torch.nn.Module) -> set[str] | None:
    """Return names that a module may read from its **kwargs; None if it may read any name."""
    forward = inspect.unwrap(module.forward)
    forward = getattr(forward, "__func__", forward)
    names = _names_in_code(module, forward)
    fields = _declared_fields(forward)
    if fields is not None:
        return names | fields
    try:
        reader = _KwargsReader(module)
        is_returned = reader.read(forward)
    except _ReadsAnyError:
        return None
    return None if is_returned else names | reader.names


def _declared_fields(forward: Callable[..., Any]) -> set[str] | None:
    """Return the fields of the TypedDict of `**kwargs: Unpack[...]`; None without such an annotation."""
    parameters = inspect.signature(forward).parameters.values()
    (annotation,) = (p.annotation for p in parameters if p.kind is p.VAR_KEYWORD)
    if isinstance(annotation, str):  # from __future__ import annotations
        try:
            hints = get_type_hints(forward)
        except Exception:  # a name of the annotations is not defined at run time
            return None
        annotation = hints.get(next(p.name for p in parameters if p.kind is p.VAR_KEYWORD))
    declared = [x for x in get_args(annotation) if is_typeddict(x)]
    return set(declared[0].__annotations__) if declared else None


class _ReadsAnyError(Exception):
    """A function may read any name from its **kwargs."""


class _KwargsReader:
    """Find what a module reads from its **kwargs as a whole.

    It may pass them on, remove some, as in `kwargs = {k: v for k, v in kwargs.items() if ...}`, or test for a name.
    `names` are those that it reads: as `kwargs["name"]`, or in loops over constants, `for k in KEYS: kwargs.get(k)`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.names: set[str] = set()
        self._seen: set[Any] = set()

    def read(self, function: Callable[..., Any], name: str | None = None) -> bool:
        """Read the code of a function, and of functions and methods of the module that get its **kwargs.

        Args:
            function: The function, in Python.
            name: The parameter with the names. Defaults to its **kwargs.

        Returns:
            True if the function returns the names.

        Raises:
            _ReadsAnyError: It may read any name.
        """
        self._seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError) as error:  # the source is not in a file
            raise _ReadsAnyError from error
        parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        loops = {x.target.id: x.iter for x in ast.walk(tree) if isinstance(x, LOOPS) and isinstance(x.target, ast.Name)}
        scope = getattr(function, "__globals__", {})
        dicts = [name] if name else []
        dicts += [
            p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD and not name
        ]
        returns = False
        for of_dict in dicts:  # the names of **kwargs and, added below, of its parts
            for use in _uses(tree, of_dict):
                parent, part = parents[use], ""
                if isinstance(parent, ast.keyword):
                    part = self._read_call(parent, parents, scope)
                elif isinstance(parent, ast.Attribute) and parent.attr in READS_ALL:
                    part = _name_of_part(parents[parent], parents)
                elif isinstance(parent, ast.Return):
                    returns = True
                elif not _is_extended(use, parent):
                    key = _key_of(parent, parents)
                    if isinstance(key, ast.Constant):
                        self.names.add(str(key.value))
                    else:
                        keys = loops.get(getattr(key, "id", ""))
                        self.names.update(_strings(scope.get(getattr(keys, "id", ""))))
                dicts += {part} - {"", *dicts}
        return returns

    def _read_call(self, argument: ast.keyword, parents: Mapping[ast.AST, ast.AST], scope: Mapping[str, Any]) -> str:
        """Read the function that gets `**kwargs` or `name=kwargs`; return the variable to which it returns them, or "".

        Raises:
            _ReadsAnyError: It may read any name.
        """
        call = parents[argument]
        callee = _find_callee(call, self.module, scope)
        if callee is None and argument.arg is not None:
            raise _ReadsAnyError
        if callee is None or callee in self._seen or not self.read(callee, argument.arg):
            return ""
        return _assigned_name(parents[call])


def _is_extended(use: ast.Name, parent: ast.AST) -> bool:
    """Return True for {**kwargs} and kwargs.update(...)."""
    is_in_dict = isinstance(parent, ast.Dict) and use in parent.values
    return is_in_dict or (isinstance(parent, ast.Attribute) and parent.attr == "update")


def _assigned_name(statement: ast.AST) -> str:
    """Return the variable to which a statement assigns a value.

    Raises:
        _ReadsAnyError: The value has no name.
    """
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    raise _ReadsAnyError


def _uses(tree: ast.AST, name: str) -> list[ast.Name]:
    """Return the places of a tree that read a variable."""
    names = [x for x in ast.walk(tree) if isinstance(x, ast.Name) and x.id == name]
    return [x for x in names if isinstance(x.ctx, ast.Load)]


def _strings(keys: object) -> Iterable[str]:
    """Return a constant collection of strings, over which a function loops."""
    if not isinstance(keys, Iterable) or not all(isinstance(x, str) for x in keys):
        raise _ReadsAnyError
    return keys


def _find_callee(call: ast.AST, module: torch.nn.Module, scope: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the function in Python, or the method of the module, that a call is of; None for others."""
    function = getattr(call, "func", None)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        called = inspect.getattr_static(type(module), function.attr, None)
    else:
        called = scope.get(getattr(function, "id", ""))
    return inspect.unwrap(called) if inspect.isfunction(called) else None


def _key_of(parent: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.expr | None:
    """Return the key of `kwargs[key]`, `key in kwargs` or `kwargs.get(key)`; None for another use of kwargs."""
    if isinstance(parent, ast.Subscript):
        return parent.slice
    if isinstance(parent, ast.Compare) and all(isinstance(x, ast.In | ast.NotIn) for x in parent.ops):
        return parent.left
    if isinstance(parent, ast.Attribute):
        call = parents[parent]
        if isinstance(call, ast.Call) and call.args and parent.attr in ("get", "pop", "setdefault"):
            return call.args[0]
    return None


def _name_of_part(call: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str:
    """Return the name of the part of kwargs that a call of `kwargs.items()` is for; "" if the part has no name.

    Raises:
        _ReadsAnyError: The call is not that of a comprehension that copies entries, or of `"name" in kwargs.keys()`.
    """
    parent = parents[call]
    if isinstance(parent, ast.Compare) and isinstance(parent.left, ast.Constant):
        return ""
    copy = parents[parent] if isinstance(parent, ast.comprehension) else None
    if isinstance(copy, ast.DictComp):
        is_copy = ast.unparse(copy.generators[0].target) == f"({ast.unparse(copy.key)}, {ast.unparse(copy.value)})"
        user = parents[copy]
        if is_copy and isinstance(user, ast.keyword) and user.arg is None:
            return ""
        if is_copy:
            return _assigned_name(user)
    raise _ReadsAnyError


def _names_in_code(module: torch.nn.Module, forward: Callable[..., Any]) -> set[str]:
    """Return strings in the forward of a module, in its decorators and in the methods that it calls.

    Parameters of these methods, and of functions that the forward calls, are included.
    """
    scope, code = getattr(forward, "__globals__", {}), getattr(forward, "__code__", None)
    functions = [scope.get(name) for name in getattr(code, "co_names", ())]
    names = set[str]().union(*(parameter_names(x)[0] for x in functions if inspect.isfunction(x)))
    codes, seen = list(_codes_of(module.forward)), set[CodeType]()
    while codes:
        if (code := codes.pop()) in seen:
            continue
        seen.add(code)
        names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        for constant in code.co_consts:
            names.update(x for x in _flat(constant) if isinstance(x, str))
        codes += [x for x in code.co_consts if inspect.iscode(x)]  # functions inside
        for name in code.co_names:
            method = inspect.getattr_static(type(module), name, None)
            codes += _codes_of(getattr(method, "fget", None) or getattr(method, "__func__", method))
    return names


def _flat(constant: object) -> Iterable[object]:
    """Return the elements of a constant, which may be a tuple or a set."""
    return constant if isinstance(constant, tuple | frozenset) else (constant,)


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that it decorates."""
    while function is not None:
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code
        function = getattr(function, "__wrapped__", None)
