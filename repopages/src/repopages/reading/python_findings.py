"""Facts in a Python syntax tree on patterns, performance and security, each with its line.

Every finding is what the code does, not a judgement. Where the tree alone does not prove a fact, such as that
`x.pop(0)` is on a list, there is no finding.
"""

import ast
import re
from collections.abc import Callable, Iterator

from repopages.reading.model import Finding
from repopages.reading.python_source import Function, Loop, Source

_PATTERN, _PERFORMANCE, _SECURITY = "pattern", "performance", "security"

_CALLS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(["eval", "exec", "compile"], (_SECURITY, "runs text as code")),
    **dict.fromkeys(
        ["pickle.load", "pickle.loads", "pickle.Unpickler"], (_SECURITY, "unpickles, which can run any code")
    ),
    **dict.fromkeys(
        ["marshal.load", "marshal.loads"], (_SECURITY, "loads marshalled data, which is not checked")
    ),
    **dict.fromkeys(
        ["shelve.open", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "joblib.load"],
        (_SECURITY, "unpickles, which can run any code"),
    ),
    **dict.fromkeys(["os.system", "os.popen", "subprocess.getoutput"], (_SECURITY, "runs a shell command")),
    **dict.fromkeys(
        ["subprocess.getstatusoutput", "asyncio.create_subprocess_shell"], (_SECURITY, "runs a shell command")
    ),
    **dict.fromkeys(
        ["os.fork", "os.forkpty", "os.posix_spawn", "pty.spawn"], (_SECURITY, "starts a process")
    ),
    **dict.fromkeys(["asyncio.create_subprocess_exec", "os.startfile"], (_SECURITY, "starts a process")),
    **dict.fromkeys(["os.kill", "os.killpg"], (_SECURITY, "sends a signal to a process")),
    **dict.fromkeys(
        ["socket.socket", "socket.create_connection", "socket.socketpair"], (_SECURITY, "opens a socket")
    ),
    **dict.fromkeys(["socket.create_server", "asyncio.start_server"], (_SECURITY, "listens on a socket")),
    **dict.fromkeys(["asyncio.start_unix_server", "asyncio.open_connection"], (_SECURITY, "opens a socket")),
    **dict.fromkeys(
        ["urllib.request.urlopen", "urllib.request.urlretrieve"], (_SECURITY, "sends a network request")
    ),
    **dict.fromkeys(["os.remove", "os.unlink", "os.rmdir", "os.removedirs"], (_SECURITY, "deletes files")),
    "shutil.rmtree": (_SECURITY, "deletes a folder with all in it"),
    **dict.fromkeys(["os.rename", "os.replace", "os.renames", "shutil.move"], (_SECURITY, "moves files")),
    **dict.fromkeys(
        ["shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree"], (_SECURITY, "writes files")
    ),
    **dict.fromkeys(
        ["os.mkdir", "os.makedirs", "os.symlink", "os.link"], (_SECURITY, "creates folders or links")
    ),
    **dict.fromkeys(["os.chmod", "os.chown", "os.umask"], (_SECURITY, "changes permissions")),
    **dict.fromkeys(
        ["torch.save", "numpy.save", "numpy.savez", "numpy.savetxt"], (_SECURITY, "writes files")
    ),
    "tempfile.mktemp": (_SECURITY, "temporary name that another process can take first"),
    **dict.fromkeys(
        ["yaml.unsafe_load", "yaml.full_load"], (_SECURITY, "YAML that can construct Python objects")
    ),
    **dict.fromkeys(["ctypes.CDLL", "ctypes.PyDLL", "ctypes.WinDLL"], (_SECURITY, "loads native code")),
    **dict.fromkeys(["ctypes.cdll.LoadLibrary", "torch.ops.load_library"], (_SECURITY, "loads native code")),
    "ssl._create_unverified_context": (_SECURITY, "TLS certificates are not checked"),
    **dict.fromkeys(["input", "getpass.getpass"], (_SECURITY, "reads from the terminal")),
    **dict.fromkeys(["copy.deepcopy"], (_PERFORMANCE, "deep copy")),
    **dict.fromkeys(["time.sleep", "asyncio.sleep"], (_PERFORMANCE, "sleeps")),
    **dict.fromkeys(["threading.Thread", "threading.Timer"], (_PERFORMANCE, "starts a thread")),
    **dict.fromkeys(["concurrent.futures.ThreadPoolExecutor"], (_PERFORMANCE, "pool of threads")),
    **dict.fromkeys(
        ["concurrent.futures.ProcessPoolExecutor", "multiprocessing.Pool"],
        (_PERFORMANCE, "pool of processes"),
    ),
    **dict.fromkeys(
        ["torch.multiprocessing.Pool", "multiprocessing.pool.Pool"], (_PERFORMANCE, "pool of processes")
    ),
    "multiprocessing.pool.ThreadPool": (_PERFORMANCE, "pool of threads"),
    **dict.fromkeys(
        ["multiprocessing.Process", "torch.multiprocessing.Process"],
        (_PERFORMANCE, "starts a process of Python"),
    ),
    **dict.fromkeys(["torch.multiprocessing.spawn"], (_PERFORMANCE, "starts a process of Python")),
    **dict.fromkeys(["asyncio.gather", "asyncio.create_task"], (_PERFORMANCE, "concurrent tasks")),
    "torch.compile": (_PERFORMANCE, "compiled by torch"),
    **dict.fromkeys(
        ["torch.cuda.synchronize", "torch.accelerator.synchronize"], (_PERFORMANCE, "waits for the GPU")
    ),
    "torch.cuda.empty_cache": (_PERFORMANCE, "returns cached GPU memory"),
    **dict.fromkeys(["torch.no_grad", "torch.inference_mode"], (_PERFORMANCE, "without autograd")),
    **dict.fromkeys(["heapq.heappush", "heapq.heappop", "heapq.heapify"], (_PERFORMANCE, "heap")),
    **dict.fromkeys(
        ["bisect.bisect", "bisect.bisect_left", "bisect.bisect_right", "bisect.insort"],
        (_PERFORMANCE, "binary search"),
    ),
    "functools.partial": (_PATTERN, "partial application"),
    **dict.fromkeys(
        ["weakref.ref", "weakref.proxy", "weakref.WeakKeyDictionary"], (_PATTERN, "weak reference")
    ),
    **dict.fromkeys(
        ["weakref.WeakValueDictionary", "weakref.WeakSet", "weakref.finalize"], (_PATTERN, "weak reference")
    ),
    "atexit.register": (_PATTERN, "runs a function when Python exits"),
    "signal.signal": (_PATTERN, "handles a signal"),
    "warnings.warn": (_PATTERN, "issues a warning"),
    "contextvars.ContextVar": (_PATTERN, "context variable"),
    "threading.local": (_PATTERN, "state per thread"),
}
"""Topic and label of calls, by the name of the function with its import spelt out."""

_PREFIXES: dict[str, tuple[str, str]] = {
    "subprocess.": (_SECURITY, "starts a process"),
    "os.exec": (_SECURITY, "starts a process"),
    "os.spawn": (_SECURITY, "starts a process"),
    "socketserver.": (_SECURITY, "listens on a socket"),
    "http.server.": (_SECURITY, "listens on a socket"),
    "requests.": (_SECURITY, "sends a network request"),
    "httpx.": (_SECURITY, "sends a network request"),
    "aiohttp.Client": (_SECURITY, "sends a network request"),
    "http.client.HTTP": (_SECURITY, "sends a network request"),
    "smtplib.SMTP": (_SECURITY, "sends a network request"),
    "ftplib.FTP": (_SECURITY, "sends a network request"),
    "tempfile.": (_SECURITY, "creates temporary files"),
    "cffi.": (_SECURITY, "loads native code"),
    "xml.etree.ElementTree.parse": (_SECURITY, "parses XML without limits on entities"),
    "xml.etree.ElementTree.fromstring": (_SECURITY, "parses XML without limits on entities"),
    "xml.dom.minidom.parse": (_SECURITY, "parses XML without limits on entities"),
    "torch.distributed.all_": (_PERFORMANCE, "collective communication"),
    "torch.distributed.reduce": (_PERFORMANCE, "collective communication"),
    "torch.distributed.broadcast": (_PERFORMANCE, "collective communication"),
    "torch.distributed.barrier": (_PERFORMANCE, "collective communication"),
    "torch.distributed.gather": (_PERFORMANCE, "collective communication"),
    "torch.distributed.scatter": (_PERFORMANCE, "collective communication"),
}
"""The same by the beginning of the name."""

_METHODS: dict[str, tuple[str, str]] = {
    "write_text": (_SECURITY, "writes files"),
    "write_bytes": (_SECURITY, "writes files"),
    "unlink": (_SECURITY, "deletes files"),
    "extractall": (_SECURITY, "unpacks an archive"),
    "__import__": (_SECURITY, "imports a module"),
}
"""The same by the name of a method, whatever it is called on."""

_DECORATORS: dict[str, tuple[str, str]] = {
    "property": (_PATTERN, "property"),
    "functools.cached_property": (_PERFORMANCE, "computed once per object"),
    "functools.lru_cache": (_PERFORMANCE, "caches results"),
    "functools.cache": (_PERFORMANCE, "caches results"),
    "contextlib.contextmanager": (_PATTERN, "context manager"),
    "contextlib.asynccontextmanager": (_PATTERN, "asynchronous context manager"),
    "abc.abstractmethod": (_PATTERN, "abstract method"),
    "typing.overload": (_PATTERN, "overloaded signature"),
    "typing.runtime_checkable": (_PATTERN, "protocol that isinstance can check"),
    "functools.wraps": (_PATTERN, "decorator"),
    "functools.singledispatch": (_PATTERN, "dispatch on the type of an argument"),
    "functools.singledispatchmethod": (_PATTERN, "dispatch on the type of an argument"),
    "functools.total_ordering": (_PATTERN, "ordering completed from one comparison"),
    "staticmethod": (_PATTERN, "static method"),
    "classmethod": (_PATTERN, "class method"),
    "atexit.register": (_PATTERN, "runs a function when Python exits"),
    "typing.final": (_PATTERN, "not meant to be overridden"),
    "torch.no_grad": (_PERFORMANCE, "without autograd"),
    "torch.inference_mode": (_PERFORMANCE, "without autograd"),
    "torch.jit.script": (_PERFORMANCE, "compiled by torch"),
    "torch.compile": (_PERFORMANCE, "compiled by torch"),
    "numba.jit": (_PERFORMANCE, "compiled by numba"),
    "numba.njit": (_PERFORMANCE, "compiled by numba"),
    "pytest.fixture": (_PATTERN, "pytest fixture"),
    "pytest.mark.parametrize": (_PATTERN, "parametrized test"),
}

_BASES: dict[str, str] = {
    "typing.Protocol": "protocol (structural type)",
    "typing_extensions.Protocol": "protocol (structural type)",
    "abc.ABC": "abstract base class",
    "typing.NamedTuple": "named tuple",
    "typing.TypedDict": "dictionary with typed keys",
    "typing.Generic": "generic class",
    "type": "metaclass",
    "enum.Enum": "enumeration",
    "enum.IntEnum": "enumeration",
    "enum.Flag": "set of flags",
    "enum.IntFlag": "set of flags",
    "torch.autograd.Function": "gradient of its own (autograd.Function)",
    "torch.nn.Module": "torch module",
}

_PROTOCOLS: dict[str, str] = {
    "__enter__": "context manager",
    "__aenter__": "asynchronous context manager",
    "__next__": "iterator",
    "__iter__": "iterable",
    "__call__": "callable object",
    "__get__": "descriptor",
    "__set_name__": "descriptor",
    "__init_subclass__": "hook on subclasses",
    "__class_getitem__": "generic class",
    "__getattr__": "attributes on demand",
    "__getstate__": "state for pickling of its own",
    "__reduce__": "state for pickling of its own",
    "__getitem__": "access by key",
    "__add__": "operators of its own",
    "__eq__": "equality of its own",
    "__torch_function__": "overrides torch functions",
    "__torch_dispatch__": "overrides torch operators",
    "__del__": "finalizer",
}

_SECRET = re.compile(
    r"(^|_)(password|passwd|secret|secret_key|api_?key|access_token|auth_token|private_key)$", re.I
)
_SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER)\s", re.I)


def findings(source: Source, *, is_test: bool) -> list[Finding]:
    """Return the findings of a file, in no particular order.

    Args:
        source: The file.
        is_test: Whether it is a test, where asserts are what they should be.
    """
    found: dict[tuple[str, str, int], Finding] = {}
    for check in _CHECKS:
        for topic, label, node in check(source):
            if not (is_test and isinstance(node, ast.Assert)):
                line = getattr(node, "lineno", 1)
                finding = Finding(topic=topic, label=label, code=_shown(source, node), line=line)
                found.setdefault((topic, label, line), finding)
    return list(found.values())


Found = Iterator[tuple[str, str, ast.AST]]
Check = Callable[[Source], Found]


def _shown(source: Source, node: ast.AST) -> str:
    """Return the evidence: the head of a statement with a body, or all of an expression."""
    if isinstance(node, ast.stmt | ast.ExceptHandler) and hasattr(node, "body"):
        text = source.lines[node.lineno - 1].strip()
        return text if len(text) <= 160 else f"{text[:158]} …"
    return source.evidence(node)


def _calls(source: Source) -> Found:
    shadowed = {node.name for node in source.tree.body if isinstance(node, Function | ast.ClassDef)}
    for node in source.of(ast.Call):
        name = source.spelt(node.func)
        known = _CALLS.get(name) if name not in shadowed else None
        known = known or next((found for prefix, found in _PREFIXES.items() if name.startswith(prefix)), None)
        if known is None and isinstance(node.func, ast.Attribute):
            known = _METHODS.get(node.func.attr)
        words = {word.arg: word.value for word in node.keywords}
        if known and known[1] == "starts a process" and _is(words.get("shell"), True):
            known = (_SECURITY, "runs a shell command (shell=True)")
        if name.startswith(("subprocess.", "requests.", "httpx.", "tempfile.")) and not _runs(name):
            known = None
        if known:
            yield *known, node


def _runs(name: str) -> bool:
    """Tell whether a call does something, unlike those that make an exception or a constant."""
    last = name.rpartition(".")[2]
    made = last in ("Popen", "Session", "Client", "AsyncClient") or last.endswith(
        ("TemporaryFile", "Directory")
    )
    return last[:1].islower() or made


def _options_of_calls(source: Source) -> Found:
    """Yield calls whose arguments matter: deserialisers, TLS, hashes, addresses, files and SQL."""
    for node in source.of(ast.Call):
        name = source.spelt(node.func)
        words = {word.arg: word.value for word in node.keywords}
        first = node.args[0] if node.args else None
        if name == "torch.load" and not _is(words.get("weights_only"), True):
            how = (
                "with weights_only=False"
                if _is(words.get("weights_only"), False)
                else "without weights_only=True"
            )
            yield _SECURITY, f"torch.load {how}, which can run any code", node
        if name == "numpy.load" and _is(words.get("allow_pickle"), True):
            yield _SECURITY, "unpickles, which can run any code", node
        if name == "yaml.load" and "Safe" not in source.written(node):
            yield _SECURITY, "YAML that can construct Python objects", node
        if _is(words.get("verify"), False):
            yield _SECURITY, "TLS certificates are not checked", node
        weak = name in ("hashlib.md5", "hashlib.sha1") or (
            name == "hashlib.new" and isinstance(first, ast.Constant) and first.value in ("md5", "sha1")
        )
        if weak and not _is(words.get("usedforsecurity"), False):
            yield _SECURITY, "hash that is not safe against collisions", node
        if _binds_all(node):
            yield _SECURITY, "names all network interfaces (0.0.0.0)", node
        if name in ("importlib.import_module", "__import__") and not isinstance(first, ast.Constant):
            yield _SECURITY, "imports a module whose name is computed", node
        if _opens_for_writing(source, node, name):
            yield _SECURITY, "writes files", node
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("execute", "executemany")
            and _is_sql(first)
        ):
            yield _SECURITY, "SQL text built from values", node


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _binds_all(node: ast.Call) -> bool:
    values = [*node.args, *(word.value for word in node.keywords)]
    values += [element for value in values if isinstance(value, ast.Tuple) for element in value.elts]
    return any(isinstance(value, ast.Constant) and value.value == "0.0.0.0" for value in values)


def _opens_for_writing(source: Source, node: ast.Call, name: str) -> bool:
    if name in ("open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open"):
        modes = node.args[1:2]
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "open":
        modes = node.args[:2]
    else:
        return False
    modes = [*modes, *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(isinstance(text, str) and re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", text) for text in texts)


def _is_sql(node: ast.expr | None) -> bool:
    """Tell whether a query is a format, sum or f-string with values in it."""
    built = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add)
    )
    if not built or node is None:
        return False
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    values = any(isinstance(part, ast.Name | ast.FormattedValue) for part in ast.walk(node))
    return values and bool(texts) and bool(_SQL.match(str(texts[0])))


def _handlers(source: Source) -> Found:
    for node in source.of(ast.ExceptHandler):
        names = [source.dotted(part) for part in getattr(node.type, "elts", [node.type]) if part is not None]
        ignored = all(isinstance(inner, ast.Pass) for inner in node.body)
        if node.type is None:
            yield _SECURITY, "bare except" + (", which ignores the error" if ignored else ""), node
        elif {"Exception", "BaseException"} & set(names):
            yield _SECURITY, "broad except" + (", which ignores the error" if ignored else ""), node
        elif "ImportError" in names or "ModuleNotFoundError" in names:
            yield _PATTERN, "optional dependency", node


def _asserts(source: Source) -> Found:
    for node in source.of(ast.Assert):
        yield _SECURITY, "assert used for a check (python -O removes it)", node


def _secrets(source: Source) -> Found:
    for node in source.of(ast.Assign, ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [source.dotted(target).rpartition(".")[2] for target in targets]
        if any(_SECRET.search(name) for name in names) and node.value is not None:
            if (
                isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and len(node.value.value) > 3
            ):
                yield _SECURITY, "text in a variable with the name of a secret", node
            called = [
                source.spelt(inner.func) for inner in ast.walk(node.value) if isinstance(inner, ast.Call)
            ]
            if any(name.startswith("random.") for name in called):
                yield _SECURITY, "secret from a predictable random number", node
    for word in source.of(ast.keyword):
        value = word.value.value if isinstance(word.value, ast.Constant) else None
        if word.arg and _SECRET.search(word.arg) and isinstance(value, str) and len(value) > 3:
            yield _SECURITY, "text in an argument with the name of a secret", word


def _functions(source: Source) -> Found:
    for node in source.of(ast.FunctionDef, ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            name = source.spelt(decorator.func if isinstance(decorator, ast.Call) else decorator)
            known = _DECORATORS.get(name.replace("typing_extensions.", "typing."))
            if known:
                yield *known, decorator
        if isinstance(node, ast.AsyncFunctionDef):
            yield _PATTERN, "asynchronous function", node
        inner = {child.name for child in ast.walk(node) if isinstance(child, Function) and child is not node}
        returned = [child.value for child in _own(source, node, ast.Return)]
        if any(isinstance(value, ast.Lambda) or source.dotted(value) in inner for value in returned if value):
            yield _PATTERN, "closure: returns a function that it defines", node
        made = {source.dotted(value.func) for value in returned if isinstance(value, ast.Call)}
        if len([name for name in made if name.rpartition(".")[2][:1].isupper()]) > 1:
            yield _PATTERN, "factory: returns objects of several classes", node
        if any(source.dotted(value) == "self" for value in returned if value):
            yield _PATTERN, "returns itself, so that calls can be chained", node
        if node.name == "__getattr__" and node in source.tree.body:
            yield _PATTERN, "module attributes on demand", node


def _own(source: Source, function: Function, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in source.of(*kinds) if source.function(node) is function)


def _classes(source: Source) -> Found:
    for node in source.of(ast.ClassDef):
        for decorator in node.decorator_list:
            text = source.written(decorator)
            if re.search(r"(^|\.)dataclass\b", text):
                yield _PATTERN, "immutable data class" if "frozen=True" in text else "data class", decorator
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if known := _BASES.get(source.spelt(inner)):
                yield _PATTERN, known, node
        if any(word.arg == "metaclass" for word in node.keywords):
            yield _PATTERN, "class with a metaclass", node
        if node.name.endswith("Mixin"):
            yield _PATTERN, "mixin", node
        for child in node.body:
            if isinstance(child, Function) and child.name in _PROTOCOLS:
                yield _PATTERN, _PROTOCOLS[child.name], child
            elif isinstance(child, ast.Assign) and source.dotted(child.targets[0]) == "__slots__":
                yield _PERFORMANCE, "slots instead of a dictionary per object", child


def _statements(source: Source) -> Found:
    for node in source.of(ast.With, ast.AsyncWith):
        yield _PATTERN, "runs inside a context manager", node
    for yielded in source.of(ast.Yield, ast.YieldFrom):
        function = source.function(yielded)
        decorators = [source.written(decorator) for decorator in function.decorator_list] if function else []
        if function and not any(re.search(r"contextmanager|fixture", decorator) for decorator in decorators):
            yield _PATTERN, "generator", function
    for match in source.of(ast.Match):
        yield _PATTERN, "structural pattern matching", match
    for name in source.of(ast.Global):
        yield _PATTERN, "function that changes module state (global)", name
    for test in source.tree.body:
        if (
            isinstance(test, ast.If)
            and source.written(test.test).replace("'", '"') == '__name__ == "__main__"'
        ):
            yield _PATTERN, "runs as a program", test
    for imported in source.of(ast.Import, ast.ImportFrom):
        around = list(source.around(imported))
        if any(isinstance(outer, Function) for outer in around):
            yield _PATTERN, "import inside a function", imported
        if any(
            isinstance(outer, ast.If) and source.dotted(outer.test).rpartition(".")[2] == "TYPE_CHECKING"
            for outer in around
        ):
            yield _PATTERN, "import for type checkers only", imported


def _registries(source: Source) -> Found:
    """Yield module-level dictionaries that functions add entries to."""
    empty = {}
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict) or (
            isinstance(value, ast.Call) and source.dotted(value.func) == "dict"
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            empty |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    for entry in source.of(ast.Subscript):
        name = source.dotted(entry.value)
        if isinstance(entry.ctx, ast.Store) and name in empty and source.function(entry):
            yield _PATTERN, "registry: functions add entries to a dictionary of the module", empty[name]


def _loops(source: Source) -> Found:
    for node in source.of(ast.For, ast.AsyncFor, ast.While):
        depth = 1 + source.loops(node)
        deeper = any(isinstance(inner, Loop) and inner is not node for inner in ast.walk(node))
        if depth >= 3 and not deeper:
            yield _PERFORMANCE, f"loops nested {depth} deep", node
    for call in source.of(ast.Call):
        name, function = source.spelt(call.func), source.function(call)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "re.compile" and function is not None:
            yield _PERFORMANCE, "compiles a regular expression inside a function", call
        if not source.loops(call):
            continue
        if name == "sorted" or (method == "sort" and _is_list(source, call.func)):
            yield _PERFORMANCE, "sorts inside a loop", call
        at_start = call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
        if method in ("pop", "insert") and at_start and _is_list(source, call.func):
            yield _PERFORMANCE, "shifts a whole list inside a loop", call
    for compare in source.of(ast.Compare):
        is_in = isinstance(compare.ops[0], ast.In | ast.NotIn)
        if is_in and source.loops(compare) and _is_list(source, compare.comparators[0]):
            yield _PERFORMANCE, "searches a list inside a loop", compare


def _sums(source: Source) -> Found:
    for node in source.of(ast.AugAssign):
        if isinstance(node.op, ast.Add) and source.loops(node):
            text = isinstance(node.value, ast.JoinedStr) or (
                isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            )
            if text:
                yield _PERFORMANCE, "text built with += inside a loop", node


def _is_list(source: Source, node: ast.expr) -> bool:
    """Tell whether the function around a node only ever assigns lists to the name in it."""
    name = node.value if isinstance(node, ast.Attribute) else node
    function = source.function(node)
    if not isinstance(name, ast.Name) or function is None:
        return False
    values = []
    for inner in ast.walk(function):
        if isinstance(inner, ast.Name) and inner.id == name.id and isinstance(inner.ctx, ast.Store):
            outer = next(source.around(inner))
            values.append(outer.value if isinstance(outer, ast.Assign | ast.AnnAssign) else None)
    return bool(values) and all(
        isinstance(value, ast.ListComp)
        or (isinstance(value, ast.List) and not value.elts)
        or (isinstance(value, ast.Call) and source.dotted(value.func) in ("list", "sorted"))
        for value in values
    )


def _recursion(source: Source) -> Found:
    for call in source.of(ast.Call):
        name = source.dotted(call.func)
        for outer in source.around(call):
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
            yield _PERFORMANCE, "copies a tensor", call
        elif method in ("item", "tolist", "cpu") and not call.args:
            yield _PERFORMANCE, "copies from the device, which waits for it", call
        elif re.fullmatch(r"[a-z]\w*[a-z0-9]_", method):
            yield _PERFORMANCE, "changes a tensor in place", call
        elif re.fullmatch(r"register_\w*hook\w*", method):
            yield _PATTERN, "registers a hook", call
        if any(word.arg in ("async_op", "non_blocking") and _is(word.value, True) for word in call.keywords):
            yield _PERFORMANCE, "asynchronous transfer", call


_CHECKS: tuple[Check, ...] = (
    _calls,
    _options_of_calls,
    _handlers,
    _asserts,
    _secrets,
    _functions,
    _classes,
    _statements,
    _registries,
    _loops,
    _sums,
    _recursion,
    _tensors,
)
