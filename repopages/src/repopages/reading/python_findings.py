"""Facts in a Python syntax tree on patterns, performance and security, each with its line.

A finding is what the code does, not a judgement. Where the tree alone does not prove a fact, such as that
`x.pop(0)` is on a list, there is no finding.
"""

import ast
import re
from collections.abc import Callable, Iterator

from repopages.reading.model import Finding
from repopages.reading.python_source import Function, Loop, Source

Found = Iterator[tuple[str, str, ast.AST]]
"""Findings as (topic, label, the node that shows it)."""

_PATTERN, _PERFORMANCE, _SECURITY = "pattern", "performance", "security"

_UNPICKLES = "unpickles, which can run any code"
_CALLS = {
    _SECURITY: {
        "runs text as code": "eval exec compile",
        _UNPICKLES: "pickle.load pickle.loads pickle.Unpickler shelve.open dill.load dill.loads"
        " joblib.load cloudpickle.load cloudpickle.loads",
        "loads marshalled data, which is not checked": "marshal.load marshal.loads",
        "runs a shell command": "os.system os.popen subprocess.getoutput subprocess.getstatusoutput"
        " asyncio.create_subprocess_shell",
        "starts a process": "subprocess.run subprocess.Popen subprocess.call subprocess.check_call"
        " subprocess.check_output os.fork os.forkpty os.posix_spawn* os.exec* os.spawn* os.startfile"
        " pty.spawn asyncio.create_subprocess_exec",
        "sends a signal to a process": "os.kill os.killpg",
        "opens a socket": "socket.socket socket.create_connection socket.socketpair asyncio.open_connection",
        "listens on a socket": "socket.create_server asyncio.start_server asyncio.start_unix_server"
        " socketserver.TCPServer socketserver.UDPServer socketserver.Threading* http.server.HTTPServer"
        " http.server.ThreadingHTTPServer",
        "sends a network request": "urllib.request.urlopen urllib.request.urlretrieve requests.get"
        " requests.post requests.put requests.patch requests.delete requests.head requests.request"
        " requests.Session httpx.get httpx.post httpx.put httpx.stream httpx.request httpx.Client"
        " httpx.AsyncClient aiohttp.ClientSession http.client.HTTPConnection http.client.HTTPSConnection"
        " smtplib.SMTP* ftplib.FTP*",
        "deletes files": "os.remove os.unlink os.rmdir os.removedirs",
        "deletes a folder with all in it": "shutil.rmtree",
        "moves files": "os.rename os.replace os.renames shutil.move",
        "writes files": "shutil.copy shutil.copy2 shutil.copyfile shutil.copytree torch.save numpy.save*",
        "creates folders or links": "os.mkdir os.makedirs os.symlink os.link",
        "changes permissions": "os.chmod os.chown os.umask",
        "creates temporary files": "tempfile.TemporaryFile tempfile.NamedTemporaryFile tempfile.mkstemp"
        " tempfile.TemporaryDirectory tempfile.mkdtemp tempfile.SpooledTemporaryFile",
        "temporary name that another process can take first": "tempfile.mktemp",
        "YAML that can construct Python objects": "yaml.unsafe_load yaml.full_load",
        "loads native code": "ctypes.CDLL ctypes.PyDLL ctypes.WinDLL ctypes.cdll.LoadLibrary cffi.FFI"
        " torch.ops.load_library",
        "parses XML without limits on entities": "xml.etree.ElementTree.parse xml.dom.minidom.parse*"
        " xml.etree.ElementTree.fromstring xml.sax.parse*",
        "TLS certificates are not checked": "ssl._create_unverified_context",
        "reads from the terminal": "input getpass.getpass",
    },
    _PERFORMANCE: {
        "deep copy": "copy.deepcopy",
        "sleeps": "time.sleep asyncio.sleep",
        "starts a thread": "threading.Thread threading.Timer",
        "pool of threads": "concurrent.futures.ThreadPoolExecutor multiprocessing.pool.ThreadPool",
        "pool of processes": "concurrent.futures.ProcessPoolExecutor multiprocessing.Pool"
        " multiprocessing.pool.Pool torch.multiprocessing.Pool",
        "starts a process of Python": "multiprocessing.Process torch.multiprocessing.Process"
        " torch.multiprocessing.spawn",
        "concurrent tasks": "asyncio.gather asyncio.create_task asyncio.TaskGroup",
        "heap": "heapq.heappush heapq.heappop heapq.heapify heapq.nlargest heapq.nsmallest",
        "binary search": "bisect.bisect* bisect.insort*",
        "compiled by torch": "torch.compile torch.jit.script",
        "waits for the GPU": "torch.cuda.synchronize torch.accelerator.synchronize",
        "returns cached GPU memory": "torch.cuda.empty_cache",
        "without autograd": "torch.no_grad torch.inference_mode",
        "collective communication": "torch.distributed.all_* torch.distributed.reduce*"
        " torch.distributed.broadcast* torch.distributed.barrier torch.distributed.gather*"
        " torch.distributed.scatter*",
    },
    _PATTERN: {
        "partial application": "functools.partial functools.partialmethod",
        "weak reference": "weakref.*",
        "runs a function when Python exits": "atexit.register",
        "handles a signal": "signal.signal",
        "issues a warning": "warnings.warn",
        "context variable": "contextvars.ContextVar",
        "state per thread": "threading.local",
        "lock": "threading.Lock threading.RLock threading.Condition asyncio.Lock multiprocessing.Lock",
    },
}
"""Labels of calls, by the spelt-out name of the function; a star stands for any ending."""

_METHODS = {
    _SECURITY: {
        "writes files": "write_text write_bytes",
        "deletes files": "unlink",
        "unpacks an archive": "extractall",
    },
}
"""Labels of methods, whatever they are called on."""

_DECORATORS = {
    _PERFORMANCE: {
        "computed once per object": "functools.cached_property",
        "caches results": "functools.lru_cache functools.cache",
        "without autograd": "torch.no_grad torch.inference_mode",
        "compiled by torch": "torch.compile torch.jit.script",
        "compiled by numba": "numba.jit numba.njit",
    },
    _PATTERN: {
        "property": "property",
        "static method": "staticmethod",
        "class method": "classmethod",
        "context manager": "contextlib.contextmanager",
        "asynchronous context manager": "contextlib.asynccontextmanager",
        "abstract method": "abc.abstractmethod",
        "overloaded signature": "typing.overload typing_extensions.overload",
        "protocol that isinstance can check": "typing.runtime_checkable",
        "decorator": "functools.wraps",
        "dispatch on the type of an argument": "functools.singledispatch functools.singledispatchmethod",
        "ordering completed from one comparison": "functools.total_ordering",
        "runs a function when Python exits": "atexit.register",
        "not meant to be overridden": "typing.final typing_extensions.final",
        "pytest fixture": "pytest.fixture",
        "parametrized test": "pytest.mark.parametrize",
    },
}

_BASES = {
    _PATTERN: {
        "protocol (structural type)": "typing.Protocol typing_extensions.Protocol",
        "abstract base class": "abc.ABC",
        "named tuple": "typing.NamedTuple",
        "dictionary with typed keys": "typing.TypedDict typing_extensions.TypedDict",
        "generic class": "typing.Generic typing_extensions.Generic",
        "metaclass": "type",
        "enumeration": "enum.Enum enum.IntEnum enum.StrEnum",
        "set of flags": "enum.Flag enum.IntFlag",
        "operation with a gradient of its own": "torch.autograd.Function torch.autograd.function.Function",
        "torch module": "torch.nn.Module torch.nn.modules.Module",
    },
}

_SPECIAL_METHODS = {
    _PATTERN: {
        "context manager": "__enter__",
        "asynchronous context manager": "__aenter__",
        "iterator": "__next__",
        "iterable": "__iter__",
        "callable object": "__call__",
        "descriptor": "__get__ __set__ __set_name__",
        "hook on subclasses": "__init_subclass__",
        "attributes on demand": "__getattr__ __getattribute__",
        "pickled in a way of its own": "__getstate__ __reduce__ __reduce_ex__",
        "access by key": "__getitem__",
        "operators of its own": "__add__ __sub__ __mul__ __or__ __and__ __matmul__",
        "equality of its own": "__eq__",
        "finalizer": "__del__",
        "overrides operations of torch": "__torch_function__ __torch_dispatch__",
    },
}

_SECRET = re.compile(r"(^|_)(password|passwd|secret|secret_key|api_?key|access_token|auth_token)$", re.I)
_RANDOM_SECRET = re.compile(r"(^|_)(password|secret|token|api_?key|salt|nonce)$", re.I)
_SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER)\s", re.I)
_WRITING = re.compile(r"[rwaxbt+]*[wax+][rwaxbt+]*")
_OPEN = ("open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open")


class _Table:
    """Labels by name, or by the beginning of a name."""

    def __init__(self, topics: dict[str, dict[str, str]]) -> None:
        self._exact: dict[str, tuple[str, str]] = {}
        self._begin: list[tuple[str, tuple[str, str]]] = []
        for topic, labels in topics.items():
            for label, names in labels.items():
                for name in names.split():
                    if name.endswith("*"):
                        self._begin.append((name[:-1], (topic, label)))
                    else:
                        self._exact[name] = (topic, label)

    def find(self, name: str) -> tuple[str, str] | None:
        """Return topic and label, or None."""
        begun = (found for begin, found in self._begin if name.startswith(begin))
        return self._exact.get(name) or (next(begun, None) if name else None)


_OF_CALL, _OF_METHOD, _OF_DECORATOR = _Table(_CALLS), _Table(_METHODS), _Table(_DECORATORS)
_OF_BASE, _OF_SPECIAL = _Table(_BASES), _Table(_SPECIAL_METHODS)


def findings(source: Source, *, is_test: bool) -> list[Finding]:
    """Return the findings of a file, each label once for a line, in no particular order.

    Args:
        source: The file.
        is_test: Whether it is a test, where an assert is no substitute for an error.
    """
    found: dict[tuple[str, int], Finding] = {}
    for check in _CHECKS:
        for topic, label, node in check(source):
            line = getattr(node, "lineno", 1)
            if (label, line) not in found and not (is_test and isinstance(node, ast.Assert)):
                found[label, line] = Finding(topic=topic, label=label, code=_shown(source, node), line=line)
    return list(found.values())


def _shown(source: Source, node: ast.AST) -> str:
    """Return the evidence: the first line of a statement with a body, or all of an expression."""
    if isinstance(node, ast.stmt | ast.ExceptHandler) and hasattr(node, "body"):
        return source.lines[node.lineno - 1].strip()[:160]
    outer = next(source.around(node), None)
    if isinstance(outer, Function | ast.ClassDef) and node in outer.decorator_list:
        return (
            f"@{source.evidence(node)} {'class' if isinstance(outer, ast.ClassDef) else 'def'} {outer.name}"
        )
    return source.evidence(node)


def _calls(source: Source) -> Found:
    for node in source.of(ast.Call):
        found = _OF_CALL.find(source.known(node.func))
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if found is None and method:
            found = _OF_METHOD.find(method)
        if found and found[1] == "starts a process" and _is(_option(node, "shell"), True):
            found = (_SECURITY, "runs a shell command (shell=True)")
        if found:
            yield *found, node
        if re.fullmatch(r"register_\w*hook\w*", method):
            yield _PATTERN, "registers a hook", node


def _option(node: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in node.keywords if word.arg == name), None)


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _arguments(source: Source) -> Found:
    """Yield calls whose arguments decide: deserialisers, TLS, hashes, addresses, files and SQL."""
    sends = {name.partition(".")[0] for name in source.imported.values()} & {"aiohttp", "httpx", "requests"}
    for node in source.of(ast.Call):
        name, first = source.known(node.func), node.args[0] if node.args else None
        if name == "torch.load" and not _is(_option(node, "weights_only"), True):
            given = _is(_option(node, "weights_only"), False)
            how = "with weights_only=False" if given else "without weights_only=True"
            yield _SECURITY, f"torch.load {how}", node
        if name == "numpy.load" and _is(_option(node, "allow_pickle"), True):
            yield _SECURITY, _UNPICKLES, node
        if name == "yaml.load" and "Safe" not in source.written(node):
            yield _SECURITY, "YAML that can construct Python objects", node
        if sends and _is(_option(node, "verify"), False):
            yield _SECURITY, "TLS certificates are not checked", node
        weak = name in ("hashlib.md5", "hashlib.sha1") or (
            name == "hashlib.new" and _text(first) in ("md5", "sha1")
        )
        if weak and not _is(_option(node, "usedforsecurity"), False):
            yield _SECURITY, "hash that is not safe against collisions", node
        if _names_all_interfaces(node):
            yield _SECURITY, "names all network interfaces (0.0.0.0)", node
        if name in ("importlib.import_module", "__import__") and not _text(first):
            yield _SECURITY, "imports a module whose name is computed", node
        if _opens_for_writing(node, name):
            yield _SECURITY, "writes files", node
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in ("execute", "executemany") and first is not None and _is_built_sql(first):
            yield _SECURITY, "SQL text built from values", node


def _names_all_interfaces(node: ast.Call) -> bool:
    values = [*node.args, *(word.value for word in node.keywords)]
    values += [element for value in values if isinstance(value, ast.Tuple) for element in value.elts]
    return any(_text(value) == "0.0.0.0" for value in values)


def _opens_for_writing(node: ast.Call, name: str) -> bool:
    if name in _OPEN:
        modes = node.args[1:2]
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "open" and not name:
        modes = node.args[:2]  # Path.open(mode), ZipFile.open(name, mode)
    else:
        return False
    modes += [word.value for word in node.keywords if word.arg == "mode"]
    return any(_WRITING.fullmatch(_text(mode)) for mode in modes)


def _is_built_sql(node: ast.expr) -> bool:
    """Tell whether a query is an f-string, sum or format with values in it."""
    parts = list(ast.walk(node))
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    is_built = isinstance(node, ast.JoinedStr | ast.BinOp) and any(
        isinstance(part, ast.Name) for part in parts
    )
    return is_built and any(isinstance(text, str) and _SQL.match(text) for text in texts)


def _handlers(source: Source) -> Found:
    for node in source.of(ast.ExceptHandler):
        names = {source.dotted(part) for part in getattr(node.type, "elts", [node.type]) if part is not None}
        ignored = ", which ignores the error" if all(isinstance(part, ast.Pass) for part in node.body) else ""
        if node.type is None:
            yield _SECURITY, f"bare except{ignored}", node
        elif names & {"Exception", "BaseException"}:
            yield _SECURITY, f"broad except{ignored}", node
        elif names & {"ImportError", "ModuleNotFoundError"}:
            yield _PATTERN, "optional dependency", node


def _asserts(source: Source) -> Found:
    for node in source.of(ast.Assert):
        yield _SECURITY, "assert used for a check (python -O removes it)", node


def _secrets(source: Source) -> Found:
    for node, targets, value in source.assignments():
        names = [source.dotted(target).rpartition(".")[2] for target in targets]
        if _is_secret(value) and any(_SECRET.search(name) for name in names):
            yield _SECURITY, "text in a variable with the name of a secret", node
        if any(_RANDOM_SECRET.search(name) for name in names):
            called = [source.known(part.func) for part in ast.walk(value) if isinstance(part, ast.Call)]
            if any(name.startswith("random.") for name in called):
                yield _SECURITY, "predictable random number in a variable with the name of a secret", node
    for word in source.of(ast.keyword):
        if word.arg and _SECRET.search(word.arg) and _is_secret(word.value):
            yield _SECURITY, "text in an argument with the name of a secret", word


def _is_secret(node: ast.expr) -> bool:
    """Tell whether a value is a text that can be a password: neither very short nor several words."""
    return len(_text(node)) > 3 and not re.search(r"\s", _text(node))


def _functions(source: Source) -> Found:
    inner: dict[Function | None, set[str]] = {}
    for node in source.functions():
        inner.setdefault(source.function(node), set()).add(node.name)
    returned: dict[Function | None, list[ast.expr]] = {}
    for result in source.of(ast.Return):
        if result.value is not None:
            returned.setdefault(source.function(result), []).append(result.value)
    for node in source.functions():
        values = returned.get(node, [])
        names = {source.dotted(value) for value in values}
        made = {source.dotted(value.func) for value in values if isinstance(value, ast.Call)}
        if isinstance(node, ast.AsyncFunctionDef):
            yield _PATTERN, "asynchronous function", node
        if names & inner.get(node, set()) or any(isinstance(value, ast.Lambda) for value in values):
            yield _PATTERN, "closure: returns a function that it defines", node
        if sum(name.rpartition(".")[2][:1].isupper() for name in made) > 1:
            yield _PATTERN, "factory: returns objects of several classes", node
        if names == {"self"} and not node.name.startswith("__"):
            yield _PATTERN, "returns itself, so that calls can be chained", node
        if node.name == "__getattr__" and node in source.tree.body:
            yield _PATTERN, "module attributes on demand", node


def _decorators(source: Source) -> Found:
    for node in [*source.functions(), *source.of(ast.ClassDef)]:
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if found := _OF_DECORATOR.find(source.known(called)):
                yield *found, decorator
            if isinstance(node, ast.ClassDef) and source.known(called) == "dataclasses.dataclass":
                frozen = isinstance(decorator, ast.Call) and _is(_option(decorator, "frozen"), True)
                yield _PATTERN, "immutable data class" if frozen else "data class", decorator


def _classes(source: Source) -> Found:
    for node in source.of(ast.ClassDef):
        for base in node.bases:
            if found := _OF_BASE.find(source.known(base.value if isinstance(base, ast.Subscript) else base)):
                yield *found, node
        if any(word.arg == "metaclass" for word in node.keywords):
            yield _PATTERN, "class with a metaclass", node
        if node.name.endswith("Mixin"):
            yield _PATTERN, "mixin", node
        for child in node.body:
            if isinstance(child, Function) and (found := _OF_SPECIAL.find(child.name)):
                yield *found, child
            elif isinstance(child, ast.Assign) and source.dotted(child.targets[0]) == "__slots__":
                yield _PERFORMANCE, "slots instead of a dictionary per object", child


def _statements(source: Source) -> Found:
    for node in [*source.of(ast.With), *source.of(ast.AsyncWith)]:
        yield _PATTERN, "uses a context manager", node
    for yielded in [*source.of(ast.Yield), *source.of(ast.YieldFrom)]:
        function = source.function(yielded)
        decorators = [source.written(decorator) for decorator in function.decorator_list] if function else []
        if function and not any(re.search(r"contextmanager|fixture", decorator) for decorator in decorators):
            yield _PATTERN, "generator", function
    for match in source.of(ast.Match):
        yield _PATTERN, "structural pattern matching", match
    for name in source.of(ast.Global):
        yield _PATTERN, "function that changes state of the module", name
    for test in source.tree.body:
        if (
            isinstance(test, ast.If)
            and source.written(test.test).replace("'", '"') == '__name__ == "__main__"'
        ):
            yield _PATTERN, "runs as a program", test


def _imports(source: Source) -> Found:
    for node in [*source.of(ast.Import), *source.of(ast.ImportFrom)]:
        around = list(source.around(node))
        tests = [
            source.dotted(outer.test).rpartition(".")[2] for outer in around if isinstance(outer, ast.If)
        ]
        if any(isinstance(outer, Function) for outer in around):
            yield _PATTERN, "import inside a function", node
        elif "TYPE_CHECKING" in tests:
            yield _PATTERN, "import for type checkers only", node


def _registries(source: Source) -> Found:
    """Yield the dictionaries of a module that its functions add entries to."""
    tables: dict[str, ast.stmt] = {}
    for node, targets, value in source.assignments():
        is_table = isinstance(value, ast.Dict) and not value.keys
        is_table |= isinstance(value, ast.Call) and source.known(value.func) == "dict"
        if is_table and next(source.around(node)) is source.tree:
            tables |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    for entry in source.of(ast.Subscript) if tables else ():
        name = source.dotted(entry.value)
        if isinstance(entry.ctx, ast.Store) and name in tables and source.function(entry):
            yield _PATTERN, "registry: functions add entries to a dictionary of the module", tables[name]


def _loops(source: Source) -> Found:
    for node in [*source.of(ast.For), *source.of(ast.AsyncFor), *source.of(ast.While)]:
        depth = 1 + source.loops(node)
        if depth >= 3 and not any(isinstance(part, Loop) and part is not node for part in ast.walk(node)):
            yield _PERFORMANCE, f"loops nested {depth} deep", node
    for call in source.of(ast.Call):
        name, method = source.known(call.func), call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "re.compile" and source.function(call) is not None:
            yield _PERFORMANCE, "compiles a regular expression inside a function", call
        if name != "sorted" and method not in ("sort", "pop", "insert"):
            continue
        at_start = bool(call.args) and _is_zero(call.args[0])
        if not source.loops(call) or (method and not _holds(source, call.func, _is_list)):
            continue
        if name == "sorted" or method == "sort":
            yield _PERFORMANCE, "sorts inside a loop", call
        elif at_start:
            yield _PERFORMANCE, "shifts a whole list inside a loop", call
    for compare in source.of(ast.Compare):
        searched = compare.comparators[0]
        is_search = isinstance(compare.ops[0], ast.In | ast.NotIn) and isinstance(searched, ast.Name)
        if is_search and source.loops(compare) and _holds(source, searched, _is_list):
            yield _PERFORMANCE, "searches a list inside a loop", compare


def _sums(source: Source) -> Found:
    for node in source.of(ast.AugAssign):
        is_text = _is_text(node.value) or _holds(source, node.target, _is_text)
        if isinstance(node.op, ast.Add) and is_text and source.loops(node):
            yield _PERFORMANCE, "text built with += inside a loop", node


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and node.value is not False


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_list(node: ast.expr | None) -> bool:
    """Tell whether an expression makes a list that may grow; a list of constants stays short."""
    made = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    return (
        isinstance(node, ast.ListComp)
        or (isinstance(node, ast.List) and not node.elts)
        or made in ("list", "sorted")
    )


def _holds(source: Source, node: ast.expr, is_kind: Callable[[ast.expr | None], bool]) -> bool:
    """Tell whether the function around a name only ever assigns values of a kind to it."""
    name = node.value if isinstance(node, ast.Attribute) else node
    if not isinstance(name, ast.Name):
        return False
    binds = source.bound.get((source.function(node), name.id), [])
    plain = [bind for bind in binds if not isinstance(bind, ast.AugAssign)]
    values = [bind.value if isinstance(bind, ast.Assign | ast.AnnAssign) else None for bind in plain]
    return bool(values) and all(is_kind(value) for value in values)


def _recursion(source: Source) -> Found:
    for call in source.of(ast.Call):
        name = source.dotted(call.func)
        for outer in source.around(call) if name else ():
            if isinstance(outer, Function):
                is_method = isinstance(next(source.around(outer)), ast.ClassDef)
                if name == (f"self.{outer.name}" if is_method else outer.name):
                    yield _PERFORMANCE, "calls itself", call
                    break


def _tensors(source: Source) -> Found:
    """Yield what costs time or memory in files that import torch."""
    if not any(name.partition(".")[0] == "torch" for name in source.imported.values()):
        return
    for call in source.of(ast.Call):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method == "clone":
            yield _PERFORMANCE, "copies with clone()", call
        elif method in ("item", "tolist", "cpu") and not call.args:
            yield _PERFORMANCE, f"{method}() waits for a GPU if the tensor is on one", call
        elif re.fullmatch(r"[a-z]\w*[a-z0-9]_", method) and not source.known(call.func):
            yield _PERFORMANCE, "operation in place", call
        if any(_is(_option(call, word), True) for word in ("async_op", "non_blocking")):
            yield _PERFORMANCE, "asynchronous transfer", call


_CHECKS: tuple[Callable[[Source], Found], ...] = (
    _calls,
    _arguments,
    _handlers,
    _asserts,
    _secrets,
    _functions,
    _decorators,
    _classes,
    _statements,
    _imports,
    _registries,
    _loops,
    _sums,
    _recursion,
    _tensors,
)
