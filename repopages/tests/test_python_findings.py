"""Findings in Python are what the syntax tree proves, with the line and the code."""

import textwrap

import pytest
from repopages.reading.model import Facts, Finding
from repopages.reading.python import read


def findings_of(text: str, role: str = "source") -> list[Finding]:
    text = textwrap.dedent(text)
    return list(read(Facts(path="a.py", size=len(text), language="Python", role=role, text=text)).findings)


def labels_of(text: str, topic: str, role: str = "source") -> set[str]:
    return {finding.label for finding in findings_of(text, role) if finding.topic == topic}


SECURITY = [
    ("eval(x)", "runs text as code"),
    ("import pickle as p\np.loads(x)", "unpickles, which can run any code"),
    ("from marshal import load\nload(x)", "loads marshalled data, which is not checked"),
    ("import torch\ntorch.load(x)", "torch.load without weights_only=True"),
    ("import torch\ntorch.load(x, weights_only=False)", "torch.load with weights_only=False"),
    ("import subprocess\nsubprocess.run(x)", "starts a process"),
    ("import subprocess\nsubprocess.run(x, shell=True)", "runs a shell command (shell=True)"),
    ("import os\nos.system(x)", "runs a shell command"),
    ("import socket\nsocket.socket()", "opens a socket"),
    ("from http.server import HTTPServer\nHTTPServer(a, b)", "listens on a socket"),
    ("server.bind(('0.0.0.0', 80))", "names all network interfaces (0.0.0.0)"),
    ("import requests\nrequests.get(x)", "sends a network request"),
    ("import requests as r\nsession.get(x, verify=False)", "TLS certificates are not checked"),
    ("open(x, 'w')", "writes files"),
    ("path.open(mode='ab')", "writes files"),
    ("path.write_text(x)", "writes files"),
    ("import shutil\nshutil.rmtree(x)", "deletes a folder with all in it"),
    ("path.unlink()", "deletes files"),
    ("from tempfile import mktemp\nmktemp()", "temporary name that another process can take first"),
    ("try: f()\nexcept: g()", "bare except"),
    ("try: f()\nexcept (Exception, OSError): pass", "broad except, which ignores the error"),
    ("assert x > 0", "assert used for a check (python -O removes it)"),
    ("import yaml\nyaml.load(x)", "YAML that can construct Python objects"),
    ("import hashlib\nhashlib.md5(x)", "hash that is not safe against collisions"),
    (
        "import random\nself.token = str(random.random())",
        "predictable random number in a variable with the name of a secret",
    ),
    ("DB_PASSWORD = 'hunter2'", "text in a variable with the name of a secret"),
    ("connect(api_key='abcd')", "text in an argument with the name of a secret"),
    ("import ctypes\nctypes.CDLL(x)", "loads native code"),
    ("import importlib\nimportlib.import_module(x)", "imports a module whose name is computed"),
    ("cursor.execute(f'SELECT * FROM t WHERE a={a}')", "SQL text built from values"),
]

HARMLESS = [
    "model.eval()",
    "def f(eval): eval(x)",
    "def input(): ...\ninput()",
    "requests = []\nrequests.get(x)",
    "import re\nre.compile(x)",
    "import torch\ntorch.load(x, weights_only=True)",
    "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)",
    "import hashlib\nhashlib.md5(x, usedforsecurity=False)",
    "open(x)",
    "open(x, 'rb')",
    "try: f()\nexcept OSError: pass",
    "password = ''",
    "password = 'Enter a word'",
    "f(x, verify=False)",
    "password = getpass()",
    "cursor.execute('SELECT 1')",
    "import importlib\nimportlib.import_module('a.b')",
    "import subprocess\nsubprocess.CalledProcessError",
]

PERFORMANCE = [
    ("for a in x:\n  for b in a:\n    while b:\n      f()", "loops nested 3 deep"),
    ("for a in x:\n  text += f'{a}'", "text built with += inside a loop"),
    ("def f():\n  s = ''\n  for a in x:\n    s += a", "text built with += inside a loop"),
    ("from copy import deepcopy\ndeepcopy(x)", "deep copy"),
    ("import time\ntime.sleep(1)", "sleeps"),
    ("import functools\n@functools.lru_cache(None)\ndef f(): ...", "caches results"),
    ("from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor()", "pool of threads"),
    ("for a in x:\n  sorted(a)", "sorts inside a loop"),
    ("import re\ndef f(): re.compile(x)", "compiles a regular expression inside a function"),
    ("def f(n):\n  return f(n - 1)", "calls itself"),
    ("class A:\n  def f(self): self.f()", "calls itself"),
    ("def f():\n  q = []\n  while q:\n    q.pop(0)", "shifts a whole list inside a loop"),
    ("def f():\n  seen = []\n  for a in x:\n    if a not in seen: ...", "searches a list inside a loop"),
    ("class A:\n  __slots__ = ('a',)", "slots instead of a dictionary per object"),
    ("import torch\nx.item()", "item() waits for a GPU if the tensor is on one"),
    ("import torch.distributed as d\nd.all_reduce(x)", "collective communication"),
]

FAST = [
    "for a in x:\n  for b in a: ...",
    "for a in x:\n  total += 1",
    "for a in sorted(x): ...",
    "for a in x: ...\nelse:\n  sorted(x)",
    "import re\nP = re.compile(x)",
    "def f():\n  q = {}\n  while q:\n    q.pop(0)",
    "def f(q):\n  while q:\n    q.pop(0)",
    "def f():\n  seen = set()\n  for a in x:\n    a in seen",
    "class A:\n  def f(self): f()",
    "x.item()",
    "for a in x:\n  def f():\n    sorted(a)",
]

PATTERNS = [
    ("from contextlib import contextmanager\n@contextmanager\ndef f(): yield", "context manager"),
    ("class A:\n  def __enter__(self): ...", "context manager"),
    ("def f(): yield 1", "generator"),
    ("def f():\n  def g(): ...\n  return g", "closure: returns a function that it defines"),
    ("from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A: ...", "immutable data class"),
    ("import typing as t\nclass A(t.Protocol[T]): ...", "protocol (structural type)"),
    ("from abc import ABC\nclass A(ABC): ...", "abstract base class"),
    ("class A:\n  @property\n  def x(self): ...", "property"),
    ("async def f(): ...", "asynchronous function"),
    ("match x:\n  case 1: ...", "structural pattern matching"),
    ("def f():\n  import a", "import inside a function"),
    ("def __getattr__(name): ...", "module attributes on demand"),
    ("if TYPE_CHECKING:\n  import a", "import for type checkers only"),
    ("from typing import overload\n@overload\ndef f(): ...", "overloaded signature"),
    ("class A:\n  def __get__(self, a, b): ...", "descriptor"),
    ("class A(type): ...", "metaclass"),
    ("class A(B, metaclass=C): ...", "class with a metaclass"),
    ("T = {}\ndef add(x): T[x] = 1", "registry: functions add entries to a dictionary of the module"),
    ("def f(x):\n  if x: return A()\n  return B()", "factory: returns objects of several classes"),
    ("try: import a\nexcept ImportError: a = None", "optional dependency"),
    ("if __name__ == '__main__': f()", "runs as a program"),
]


@pytest.mark.parametrize(("text", "label"), SECURITY)
def test_security_findings(text: str, label: str) -> None:
    assert labels_of(text, "security") == {label}


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_a_risk_is_no_finding(text: str) -> None:
    assert labels_of(text, "security") == set()


@pytest.mark.parametrize(("text", "label"), PERFORMANCE)
def test_performance_findings(text: str, label: str) -> None:
    assert label in labels_of(text, "performance")


@pytest.mark.parametrize("text", FAST)
def test_what_only_looks_slow_is_no_finding(text: str) -> None:
    assert labels_of(text, "performance") == set()


@pytest.mark.parametrize(("text", "label"), PATTERNS)
def test_patterns(text: str, label: str) -> None:
    assert label in labels_of(text, "pattern")


def test_a_finding_has_the_code_and_its_line() -> None:
    [finding] = findings_of("import os\n\nx = os.system(\n    'ls'  # now\n)\n")
    assert (finding.line, finding.code) == (3, "os.system('ls')")


def test_a_decorator_is_shown_with_what_it_decorates() -> None:
    [finding] = findings_of("from functools import cache\n@cache\ndef f(): ...")
    assert (finding.line, finding.code) == (2, "@cache def f")


def test_asserts_in_tests_are_no_finding() -> None:
    assert labels_of("def test_a():\n  assert x", "security", role="test") == set()
