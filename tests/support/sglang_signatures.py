"""Signatures of the installed SGLang's functions, read from its sources: SGLang itself does not import on every machine."""

import ast
import functools

from rollout_sglang.server_options import find_sglang_folder


@functools.cache
def read_function(module, name):
    """Return a function with the parameters and defaults of an SGLang function, which returns its arguments by name."""
    tree = ast.parse((find_sglang_folder() / f"{module}.py").read_text())
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name)
    node.decorator_list, node.returns, node.body = [], None, [ast.Return(ast.Call(ast.Name("locals", ast.Load()), [], []))]
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    found = {}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), module, "exec"), found)
    return found[name]


@functools.cache
def list_calls(module, name):
    """Return the keywords of each call of a function in a module."""
    calls = ast.walk(ast.parse((find_sglang_folder() / f"{module}.py").read_text()))
    found = [each for each in calls if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name]
    assert not any(each.args for each in found)
    return [{each.arg: ast.unparse(each.value) for each in call.keywords} for call in found]
