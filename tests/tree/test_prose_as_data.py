"""No product code depends on prose: the text of a note, a refusal or a reason, the message of an error, a report.

Errors of torch and of other packages are recognized by their text in `torch_compat` alone. Names of graph nodes are not
searched either: the metadata of a node has its kind. Tests check codes, kinds and values, and no sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tree.test_layers import FILES, ROOT

PROSE = {"text", "label", "cause", "fix", "args"}
SOURCES = ("Note", "Refusal", "Error", "Exception")
LISTS = ("notes", "fallbacks", "find_notes")
READS = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "find", "index"}
KEYED = {"setdefault", "get", "pop", "dumps"}  # methods whose first argument is a key, or a part of a digest
HASHES = {"hash", "hash_text"}
PHRASE = re.compile(r"\b[A-Za-z]+(?:[,;:.]? [a-z]+){2,}\b")  # three or more words without a number or name in between


def holders(tree: ast.AST) -> set[str]:
    """Return the names of variables that hold notes, refusals or errors."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation).endswith(SOURCES):
            found.add(node.arg)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            listed = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
            if isinstance(listed, ast.Attribute) and listed.attr in LISTS:
                found.add(node.target.id)
    return found | {"note", "refusal", "error"}


def searches_phrase(node: ast.Compare) -> bool:
    """Return True for `"several words" in text`, for `"word" in reason`, of any source, and for `"x" in node.name`."""
    if not isinstance(node.ops[0], ast.In | ast.NotIn) or not isinstance(node.left, ast.Constant):
        return False
    phrase, text = str(node.left.value).strip(), ast.unparse(node.comparators[0]).rpartition(".")[2]
    is_searched = text in {"reason", "message", "cause"} or is_node_name(node.comparators[0])
    return " " in phrase or (bool(phrase) and is_searched)


def is_node_name(node: ast.AST) -> bool:
    """Return True for the name of a variable's object, such as `node.name`."""
    return isinstance(node, ast.Attribute) and node.attr == "name" and isinstance(node.value, ast.Name)


class ProseOf:
    """The expressions of a function that are prose."""

    def __init__(self, tree: ast.AST) -> None:
        self.names, self.texts = holders(tree), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and self.is_prose(node.value):
                self.texts.update(target.id for target in node.targets if isinstance(target, ast.Name))

    def is_prose(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return self.is_prose(node.value)
        if isinstance(node, ast.Call):
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            is_text = ast.unparse(node.func) == "str" and any(map(self.is_holder, node.args))
            is_joined = method == "join" and any(map(self.is_prose, node.args))
            return is_text or is_joined or method.startswith("describe_")
        if isinstance(node, ast.Name):
            return node.id in self.texts
        if isinstance(node, ast.Attribute) and node.attr.endswith("_reason"):
            return True
        return isinstance(node, ast.Attribute) and node.attr in PROSE and self.is_holder(node.value)

    def is_holder(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.names


def comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each expression that compares, cuts, searches or hashes prose, or looks it up in a table."""
    prose = ProseOf(tree)
    for node in ast.walk(tree):
        read: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            if searches_phrase(node):
                yield node
            read = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            read = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in HASHES:
            read = list(node.args)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func
            read = [method.value] * (method.attr in READS)
            if ast.unparse(method.value) == "re":
                read = list(node.args)
                if any(map(is_node_name, read)):
                    yield node
            elif method.attr in KEYED:
                read = [part for arg in node.args[:1] for part in (arg.elts if isinstance(arg, ast.List) else [arg])]
        if any(map(prose.is_prose, read)):
            yield node


def found_in(file: Path) -> list[str]:
    """Return the places of a file whose code depends on prose."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    wrong = {node.lineno: ast.unparse(node) for one in functions for node in comparisons(one)}
    return [f"{file.relative_to(ROOT)}:{line}: {code}" for line, code in wrong.items()]


def test_no_code_depends_on_prose() -> None:
    files = [file for name, file in FILES.items() if "torch_compat" not in name.split(".")]
    assert not [place for file in files for place in found_in(file)]


@pytest.mark.parametrize(
    "code",
    [
        "for note in report.notes:\n if note.text.startswith('x'): pass",
        "[one for one in report.find_notes(kind) if 'x' in one.label]",
        "def f(refused: Refusal): return refused.text == 'x'",
        "try: pass\nexcept ValueError as failure:\n text = str(failure)\n found = re.search('x', text)",
        "try: pass\nexcept ValueError as failure:\n found = failure.args[0].partition(';')",
        "def f(text: str): return 'recompile limit' in text",
        "def f(reason: str): return 'skipfiles' in reason",
        "re.sub('0x[0-9a-f]+', '', self.info.unsplit_reason)",
        "hash_text(json.dumps([*self.options.items(), self.unsplit_reason]))",
        "texts = step.describe_replicated()\nkey = re.sub('[0-9]+%', '', ' '.join(texts))",
        "for error in errors: ranks.setdefault(str(error), []).append(rank)",
        "for error in errors: ranks[str(error)] = 0",
        "[node for node in weights if '_parameters_' in node.name]",
        "re.match('.*?_modules_', node.name)",
    ],
)
def test_prose_that_is_read_is_found(code: str) -> None:
    assert [*comparisons(ast.parse(code))]


def texts_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string constants of a tree, without docstrings and the keys of dictionaries."""
    left_out = {
        id(part)
        for node in ast.walk(tree)
        for part in ([node.value] if isinstance(node, ast.Expr) else node.keys if isinstance(node, ast.Dict) else [])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node


def word_triples(text: str) -> set[tuple[str, ...]]:
    """Return each three consecutive words of the phrases of a text."""
    phrases = [re.findall("[a-z]+", phrase.lower()) for phrase in PHRASE.findall(text)]
    return {tuple(words[i : i + 3]) for words in phrases for i in range(len(words) - 2)}


@cache
def product_triples() -> set[tuple[str, ...]]:
    """Return the triples of words in the texts of the product."""
    found = word_triples((ROOT / "lowering/base/error_codes.toml").read_text())
    for file in FILES.values():
        for node in texts_of(ast.parse(file.read_text())):
            found |= word_triples(str(node.value))
    return found


def pinned_sentences(tree: ast.AST) -> list[str]:
    """Return texts of asserts, and of `match=` of pytest, that repeat three consecutive words of a text of the product.

    Goldens of `assert_expected_inline`, the messages of asserts and tables of parameters are not searched.
    """
    checks: list[ast.AST] = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    checks += [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "match"]
    texts = {str(node.value) for check in checks for node in texts_of(check)}
    return sorted(text for text in texts if word_triples(text) & product_triples())


def test_no_test_pins_a_sentence() -> None:
    """An error has a code, a note a kind and a subject; a warning is compared with the constant of the product."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "tree"]
    found = {file.relative_to(ROOT).as_posix(): pinned_sentences(ast.parse(file.read_text())) for file in files}
    assert not {name: texts for name, texts in found.items() if texts}


@pytest.mark.parametrize(
    "code",
    [
        "assert 'input y is changed in place and shares memory with input x' in words",
        "assert words.startswith('The process group has one rank')",
        "with pytest.raises(SpError, match='SP624: two threads of this process'): run()",
        "assert f'{n} ranks do not divide {heads} query heads' == refusal",
        "assert 'Set the same seed' in words",
    ],
)
def test_a_pinned_sentence_is_found(code: str) -> None:
    assert pinned_sentences(ast.parse(code))
