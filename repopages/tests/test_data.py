"""Keys of TOML, YAML and JSON, what known files depend on, and hostile data."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_files import items, labels, read_as

PYPROJECT = """\
# The shop.

[project]
name = "shop"  # as on PyPI
dependencies = [
    "click>=8",
    "requests[socks]; python_version > '3'",
]

[project.optional-dependencies]
test = ["pytest"]

# How to test.
[tool.pytest.ini_options]
addopts = "-ra"

[[tool.mypy.overrides]]
module = "a"

[[tool.mypy.overrides]]
module = "b"
strict = true
"""


def test_toml() -> None:
    facts = read_as("pyproject.toml", PYPROJECT)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "The shop."
    assert {item.kind for item in found.values()} == {"key"}
    assert found["project.name"].value == '"shop"'
    assert found["project.name"].doc == "as on PyPI"
    assert found["project.name"].line == 4
    assert found["project.dependencies"].value.startswith('[ "click>=8", "requests[')
    assert found["tool.pytest.ini_options"].doc == "How to test."
    assert found["tool.mypy.overrides.strict"].value == "true", "keys of repeated tables are listed once"
    assert [(taken.module, taken.line) for taken in facts.imports] == [
        ("click", 6),
        ("requests", 7),
        ("pytest", 11),
    ]


def test_package_json() -> None:
    text = json.dumps(
        {
            "name": "shop",
            "main": "lib/index.js",
            "bin": {"shop": "./bin/shop.js"},
            "dependencies": {"react": "^18", "@scope/a.b": "1"},
            "devDependencies": {"jest": "29"},
        },
        indent=1,
    )
    facts = read_as("web/package.json", text)
    assert [taken.module for taken in facts.imports] == [
        "./lib/index.js",
        "./bin/shop.js",
        "react",
        "@scope/a.b",
        "jest",
    ]
    assert items(facts)["dependencies"].value == "2 keys"
    assert items(facts)["dependencies.react"].value == '"^18"'


def test_cargo_and_workflows() -> None:
    cargo = '[dependencies]\nserde = "1"\nrayon.workspace = true\n[dev-dependencies.clap]\nversion = "4"\n'
    assert [taken.module for taken in read_as("Cargo.toml", cargo).imports] == ["serde", "rayon", "clap"]
    workflow = (
        "jobs:\n  a:\n    steps:\n      - uses: actions/checkout@v4\n      - run: ls\n      - uses: a/b@c\n"
    )
    facts = read_as(".github/workflows/ci.yml", workflow)
    assert [(taken.module, taken.line) for taken in facts.imports] == [
        ("actions/checkout@v4", 4),
        ("a/b@c", 6),
    ]
    assert read_as("other/ci.yml", workflow).imports == ()


def test_yaml() -> None:
    text = """\
# The shop.
name: shop
# Prices.
prices: &p
  tea: 3 # EUR
  "red wine": [1, 2]
old: *p
x: !!python/object:os.system a
"""
    facts = read_as("shop.yaml", text)
    found = items(facts)
    assert facts.doc == "The shop."
    assert found["prices"].doc == "Prices."
    assert found["prices.tea"].value == "3"
    assert found["prices.tea"].doc == "EUR"
    assert found["prices.red wine"].value == "[1, 2]"
    assert ("tag that constructs an object", 8) in labels(facts)


def test_keys_beyond_the_limit_are_counted() -> None:
    facts = read_as("large.json", json.dumps({f"key{i}": {"a": 1} for i in range(5000)}))
    (finding,) = facts.findings
    assert finding.code == "and 4,700 more keys"
    assert len(facts.items) == 300


def test_a_secret_is_noted_without_its_value() -> None:
    facts = read_as("a.yaml", "db:\n  password: hunter2hunter2\n  api_key: ${KEY}\n")
    (finding,) = facts.findings
    assert (finding.topic, finding.code, finding.line) == ("security", "password", 2)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.yaml", "- " * 50_000),
        ("a.yaml", "? " * 50_000),
        ("a.yaml", "".join(" " * i + "a:\n" for i in range(600))),
        ("a.yaml", "[" * 20_000),
        ("a.json", "[" * 50_000),
        ("a.json", '{"a":' * 20_000),
        ("a.toml", "a = " + "[" * 20_000),
        ("a.toml", "<a>" * 2000),
    ],
)
def test_hostile_nesting_gives_a_problem(path: str, text: str) -> None:
    facts = read_as(path, text)
    assert facts.problem
    pickle.dumps(facts)


def test_aliases_are_not_expanded() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    facts = read_as("bomb.yaml", "\n".join(lines))
    assert facts.problem == ""
    assert len(items(facts)) == 40


@pytest.mark.parametrize("path", ["a.toml", "a.yaml", "a.json", "package.json", "Cargo.toml"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_text_makes_a_reader_fail(path: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(PYPROJECT)))
    text = PYPROJECT[:cut] + data.draw(st.text(max_size=60)) + PYPROJECT[cut:]
    pickle.dumps(read_as(path, text))
