"""Readers of programming languages: definitions, imports, errors, findings, and broken or hostile sources."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_files import items, labels, read_as, words
from repopages.reading.docstrings import markdown, parse

CPP = """\
// Copyright 2020 The Shop. All rights reserved.

/// Baskets of the shop.
#pragma once
#include <vector>
#include "shop/price.h"

/**
 * A basket.
 *
 * @param T what it holds
 */
template <typename T>
class SHOP_API Basket final : public Base<T>, private Other {
 public:
  explicit Basket(int size, std::vector<T>&& things) : size_(size) {}
  ~Basket() override;
  virtual int count(const char* name, ...) const = 0;  // abstract
  enum class Colour : int { Red = 1, Green };
  static constexpr int kMax = 5;
 private:
  int size_, *next_;
};

namespace shop::detail {
inline int price(int thing) {
  if (thing < 0) throw std::runtime_error("no price for " + std::to_string(thing));
  try { return std::atoi(getenv("PRICE")); } catch (const std::exception& e) { return 0; }
}
}
namespace { void hidden(); }
using Things = std::vector<int>;
typedef struct { int x; } Point;
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define LIMIT 4
const int kRate = 4;
static int helper(char* to) { strcpy(to, "x"); system("ls"); return 0; }
int Basket<int>::count(const char* name) const { return 0; }
TEST(BasketTest, Counts) { EXPECT_EQ(1, 1); }
"""


def test_cpp_definitions() -> None:
    facts = read_as("basket.h", CPP)
    found = items(facts)
    assert facts.language == "C++"
    assert facts.problem == ""
    assert facts.doc == "Baskets of the shop."
    basket = found["Basket"]
    assert basket.kind == "class"
    assert basket.doc.startswith("A basket.\n\nArgs:\n    T: what it holds")
    assert basket.signature.startswith("template <typename T> class SHOP_API Basket final : public Base<T>")
    assert basket.bases == ("Base<T>", "Other")
    assert (basket.line, basket.end) == (13, 23)
    assert found["Basket.Basket"].parameters == ("size", "things")
    assert found["Basket.Basket"].signature == "explicit Basket(int size, std::vector<T>&& things)"
    assert found["Basket.~Basket"].public
    assert found["Basket.Colour.Red"].kind == "member"
    assert found["Basket.Colour.Red"].value == "1"
    assert found["Basket.kMax"].kind == "constant"
    assert not found["Basket.size_"].public
    assert not found["Basket.next_"].public
    assert found["Basket.count"].line == 38, "the definition outside the class belongs to it"
    assert found["shop.detail.price"].parameters == ("thing",)
    assert not found["(anonymous).hidden"].public
    assert not found["helper"].public
    assert found["Things"].signature == "using Things = std::vector<int>"
    assert found["Point"].kind == "struct"
    assert found["Point.x"].kind == "attribute"
    assert found["LARGER"].parameters == ("a", "b")
    assert found["LIMIT"].value == "4"
    assert found["kRate"].kind == "constant"


def test_cpp_facts() -> None:
    facts = read_as("basket.h", CPP)
    assert [taken.module for taken in facts.imports] == ["<vector>", "shop/price.h"]
    (error,) = facts.raised
    assert (error.name, error.message, error.where) == (
        "std::runtime_error",
        "no price for…",
        "shop.detail.price",
    )
    assert [caught.name for caught in facts.caught] == ["std::exception"]
    assert words(facts, "environment") == {"PRICE": 28}
    assert {("writes text without a bound", 37), ("runs a command of the shell", 37)} <= labels(facts)
    assert facts.tests == 1
    assert {"std.runtime_error", "Basket", "getenv"} <= facts.names


def test_c_options_and_macros() -> None:
    text = """\
/* The tool of the shop. */

PyAPI_FUNC(PyObject *) Shop_New(int size);
C10_DIAGNOSTIC_PUSH()
static struct option options[] = {{"help", no_argument, NULL, 'h'}, {"size", required_argument, 0, 's'}};
int main(int argc, char **argv) {
  char *p = malloc(3);
  while (getopt(argc, argv, "hs:") != -1) { p = realloc(p, 9); }
  free(p);
}
struct node { struct node *next; /* the one behind */ int (*compare)(int, int); };
"""
    facts = read_as("tool.c", text)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "The tool of the shop."
    assert set(words(facts, "option")) == {"--help", "--size", "-h", "-s"}
    assert found["Shop_New"].parameters == ("size",)
    assert found["main"].parameters == ("argc", "argv")
    assert found["node.compare"].kind == "attribute"
    assert ("allocates memory in a loop", 8) in labels(facts)


def test_cuda_kernels() -> None:
    text = """\
template <typename T>
__global__ void add(const T* left, int count) { __shared__ float part[3]; __syncthreads(); }
__device__ float half(float x) { return x / 2; }
void launch() { add<<<1, 32>>>(p, 3); }
"""
    facts = read_as("add.cu", text)
    found = items(facts)
    assert facts.problem == ""
    assert found["add"].kind == "kernel"
    assert found["add"].parameters == ("left", "count")
    assert found["half"].decorators == ("__device__",)
    assert {
        ("kernel, which runs on the device", 2),
        ("memory shared by the threads of a block", 2),
        ("configuration of a kernel launch", 4),
    } <= labels(facts)


RUST = """\
//! Baskets of the shop.

use std::{fmt as format, io::{self, Read}, process::Command};
use crate::price::*;
mod price;

/// What the user asks for.
#[derive(Parser, Debug)]
pub struct Args<T: Clone> {
    /// Name of the shop.
    #[arg(short, long)]
    pub shop_name: T,
    secret: u8,
}

pub enum Colour { Red, Green(u8), Blue { depth: u8 } }

impl<T> format::Display for Args<T> {
    fn fmt(&self, f: &mut format::Formatter) -> Result<(), Error> {
        unsafe { panic!("no {} here", self.secret) }
    }
}

impl Colour {
    pub const ALL: usize = 3;
    pub fn mix(self, other: Colour) -> Colour {
        let home = std::env::var("SHOP_HOME").unwrap();
        Command::new("ls");
        match read() { Ok(x) => x, Err(io::Error { .. }) => other }
    }
}

pub trait Priced: Clone { fn price(&self) -> u32; }
macro_rules! basket { ($a:expr) => {} }
pub mod tests { #[test] fn works() { assert_eq!(1, 1); } }
"""


def test_rust() -> None:
    facts = read_as("lib.rs", RUST)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "Baskets of the shop."
    assert {(taken.module, taken.name, taken.alias) for taken in facts.imports} == {
        ("std", "fmt", "format"),
        ("std", "io", ""),
        ("std::io", "Read", ""),
        ("std::process", "Command", ""),
        ("crate::price", "*", ""),
        ("self::price", "", ""),
    }
    assert found["Args"].doc == "What the user asks for."
    assert found["Args"].bases == ("Parser", "Debug", "format::Display")
    assert found["Args.shop_name"].doc == "Name of the shop."
    assert not found["Args.secret"].public
    assert found["Args.fmt"].parameters == ("self", "f")
    assert found["Args.fmt"].public, "methods of a trait are as public as the trait"
    assert found["Colour.Green"].signature == "Green(u8)"
    assert found["Colour.Blue.depth"].kind == "attribute"
    assert found["Colour.mix"].signature == "pub fn mix(self, other: Colour) -> Colour"
    assert found["Colour.ALL"].value == "3"
    assert found["Priced"].bases == ("Clone",)
    assert not found["basket"].public
    assert words(facts, "option") == {"--shop-name": 12, "-s": 12}
    assert words(facts, "environment") == {"SHOP_HOME": 27}
    assert [(error.name, error.message, error.where) for error in facts.raised] == [
        ("panic!", "no … here", "Args.fmt")
    ]
    assert {("unsafe block", 20), ("panics if there is no value", 27), ("starts a process", 28)} <= labels(
        facts
    )
    assert facts.tests == 1


GO = """\
// Package shop sells things.
package shop

import (
	"flag"
	run "os/exec"
	. "example.com/shop/price"
)

// Basket holds things.
type Basket struct {
	Size, Weight int // in grams
	io.Reader
	owner string
}

type Priced interface {
	Price(name string) (int, error)
}

// Add puts a thing in.
func (b *Basket) Add(name string, counts ...int) (total int, err error) {
	go b.count()
	defer b.mutex.Unlock()
	run.Command("ls")
	if os.Getenv("SHOP_HOME") == "" {
		panic("no home")
	}
	return 0, errors.New("empty")
}

const (
	Small = iota
	large
)

var port = flag.Int("port", 80, "The port.")

func TestAdd(t *testing.T) {}
"""


def test_go() -> None:
    facts = read_as("basket_test.go", GO)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "Package shop sells things."
    assert [(taken.module, taken.name, taken.alias) for taken in facts.imports] == [
        ("flag", "", ""),
        ("os/exec", "", "run"),
        ("example.com/shop/price", "*", ""),
    ]
    assert found["Basket"].doc == "Basket holds things."
    assert found["Basket"].bases == ("io.Reader",)
    assert found["Basket.Weight"].doc == "in grams"
    assert not found["Basket.owner"].public
    assert found["Basket.Add"].parameters == ("name", "counts")
    assert found["Basket.Add"].doc == "Add puts a thing in."
    assert found["Priced"].kind == "interface"
    assert found["Priced.Price"].parameters == ("name",)
    assert found["Small"].value == "iota"
    assert not found["large"].public
    assert [(m.word, m.text) for m in facts.mentions if m.kind == "option"] == [("--port", "The port.")]
    assert words(facts, "environment") == {"SHOP_HOME": 26}
    assert [(error.name, error.message) for error in facts.raised] == [
        ("panic", "no home"),
        ("errors.New", "empty"),
    ]
    assert {("starts a goroutine", 23), ("defers a call", 24), ("starts a process", 25)} <= labels(facts)
    assert facts.tests == 1


TYPESCRIPT = """\
/* Baskets of the shop. */
import shop, { price as cost, type Thing } from "./price";
import * as view from "view";
import { exec } from "node:child_process";
import "./side-effect";

/**
 * A basket.
 */
export default class Basket<T> extends Base implements Priced {
  private size: number = 1;
  #secret = 2;
  @logged() add(name: string, { count, unit = "g" }: Thing, ...rest): void {
    throw new RangeError(`no room for ${name}`);
  }
  handler = (event) => this.add(event);
}
export interface Priced extends Named { price: number; cost(name: string): number }
export enum Colour { Red = 1, Green }
export const load = async (path) => {
  for (const a of x) for (const b of a) for (const c of b) use(c);
  if (process.env.SHOP_HOME) exec(path);
};
export { cost as dearness };
export * from "./other";
namespace inner { export function nested(a: any) {} }
function helper(value) { try { eval(value); } catch (error) { if (error instanceof TypeError) return; } }
describe("x", () => { it("works", () => {}); });
"""


def test_typescript() -> None:
    facts = read_as("basket.ts", TYPESCRIPT)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "Baskets of the shop."
    assert {(taken.module, taken.name, taken.alias) for taken in facts.imports} == {
        ("./price", "default", "shop"),
        ("./price", "price", "cost"),
        ("./price", "Thing", ""),
        ("view", "", "view"),
        ("node:child_process", "exec", ""),
        ("./side-effect", "", ""),
        ("./other", "*", ""),
    }
    assert facts.exports == ("Basket", "Colour", "Priced", "dearness", "load")
    assert found["Basket"].doc == "A basket."
    assert found["Basket"].bases == ("Base", "Priced")
    assert not found["Basket.size"].public
    assert not found["Basket.#secret"].public
    assert found["Basket.add"].parameters == ("name", "count", "unit", "rest")
    assert found["Basket.add"].decorators == ("logged()",)
    assert found["Basket.handler"].kind == "method"
    assert list(found["Colour"].members) == [found["Colour.Red"], found["Colour.Green"]]
    assert found["load"].signature == "export const load = async (path)"
    assert found["load"].public
    assert not found["helper"].public
    assert found["inner.nested"].parameters == ("a",)
    assert [(error.name, error.message, error.where) for error in facts.raised] == [
        ("RangeError", "no room for …", "Basket.add")
    ]
    assert [error.name for error in facts.caught] == ["TypeError"]
    assert words(facts, "environment") == {"SHOP_HOME": 22}
    assert {("starts a process", 22), ("runs text as code", 27), ("loops nested 3 deep", 21)} <= labels(facts)
    assert facts.tests == 1


def test_commonjs() -> None:
    text = """\
'use strict';
// Baskets of the shop.

const fs = require('fs'), { join, resolve: at } = require("./paths");
function helper(a) {}
exports.load = function (path) { return fs.readFileSync(join(path)); };
module.exports.size = 3;
Basket.prototype.add = function (thing) {};
document.body.innerHTML = name;
program.option('-p, --port <number>', 'The port.');
require(name);
"""
    facts = read_as("basket.js", text)
    found = items(facts)
    assert facts.doc == "Baskets of the shop."
    assert {(taken.module, taken.name, taken.alias) for taken in facts.imports} == {
        ("fs", "", "fs"),
        ("./paths", "join", ""),
        ("./paths", "resolve", "at"),
    }
    assert facts.exports == ("load", "size")
    assert found["load"].parameters == ("path",)
    assert not found["helper"].public
    assert found["Basket.add"].parameters == ("thing",)
    assert set(words(facts, "option")) == {"-p", "--port"}
    assert {
        ("blocks while it reads files", 6),
        ("writes HTML into the page", 9),
        ("imports a module named at run time", 11),
    } <= labels(facts)


def test_shell() -> None:
    text = """\
#!/bin/bash
# Install the shop.

source ./lib.sh
# Say how to use it.
usage() { local name=$1; echo "$SHOP_HOME ${LEVEL:-3} $name"; }
readonly MAX=3
PORT=${PORT:-80}
while getopts "ab:" letter; do :; done
case "$1" in
  -h|--help) usage ;;
  --name=*) echo $MAX ;;
esac
curl -s https://shop.example | sh
rm -rf "$TARGET/x"
eval "$command"
read -r LINE
echo $LINE
exit 3
"""
    facts = read_as("install.sh", text)
    found = items(facts)
    assert facts.problem == ""
    assert facts.doc == "Install the shop."
    assert [taken.module for taken in facts.imports] == ["./lib.sh"]
    assert found["usage"].doc == "Say how to use it."
    assert found["MAX"].kind == "constant"
    assert words(facts, "environment") == {"SHOP_HOME": 6, "LEVEL": 6, "PORT": 8, "TARGET": 15}
    assert set(words(facts, "option")) == {"-a", "-b", "-h", "--help", "--name"}
    assert {
        ("runs a download at once", 14),
        ("removes what a variable names", 15),
        ("runs text as code", 16),
    } <= labels(facts)
    assert [error.name for error in facts.raised] == ["exit 3"]


def test_a_licence_alone_is_not_the_purpose_of_a_file() -> None:
    text = "// Copyright 2020 A.\n//\n// Licensed under the Apache License.\n\n#include <a.h>\n"
    assert read_as("a.c", text).doc == ""


def test_comments_belong_to_the_definition_below_them() -> None:
    text = "// Of f.\nint f(void);\n\n// Of nothing.\n\nint g(void);\n"
    found = items(read_as("a.c", text))
    assert found["f"].doc == "Of f."
    assert found["g"].doc == ""
    assert read_as("a.c", text).doc == ""


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("a.c", "int f(int x) { return (; }\nint g(int y) { return y; }\n", "g"),
        ("a.rs", "fn f( { }\n\npub fn g(y: u8) {}\n", "g"),
        ("a.go", "package a\nfunc f( {\n}\n\nfunc g(y int) {}\n", "g"),
        ("a.js", "const a = { b: };\n\nfunction g(y) {}\n", "g"),
        ("a.sh", "g() { :; }\nif then\n", "g"),
    ],
)
def test_broken_syntax_is_named_and_the_rest_is_read(path: str, text: str, name: str) -> None:
    facts = read_as(path, text)
    assert facts.problem.startswith("line ")
    assert "not understood by the" in facts.problem
    assert name in items(facts)


_ALL = {
    "a.c": "/* A. */\n#define B(c) c\nstruct d { int e; };\nstatic int f(char *g) { return strlen(g); }\n",
    "a.cpp": CPP,
    "a.cu": CPP,
    "a.rs": RUST,
    "a.go": GO,
    "a.js": TYPESCRIPT,
    "a.ts": TYPESCRIPT,
    "a.tsx": TYPESCRIPT,
    "a.sh": 'f() { for x in 1; do echo "$(cat <<E\n$A\nE\n)"; done; }\ncase $1 in -a) ;; esac\n',
}


@pytest.mark.parametrize("path", _ALL)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_source_makes_a_reader_fail(path: str, data: st.DataObject) -> None:
    source = _ALL[path]
    start = data.draw(st.integers(0, len(source)))
    end = data.draw(st.integers(start, min(len(source), start + 200)))
    text = source[:start] + data.draw(st.text(max_size=30)) + source[end:]
    facts = read_as(path, text)
    lines = text.count("\n") + 1
    assert all(1 <= item.line <= item.end <= lines for _, item in facts.walk())
    assert all(1 <= finding.line <= lines for finding in facts.findings)
    pickle.dumps(facts)


@pytest.mark.parametrize("path", _ALL)
@pytest.mark.parametrize("unit", ["(", "a.b(", "class A {", "mod a {", "`${"])
def test_deep_nesting_is_read(path: str, unit: str) -> None:
    facts = read_as(path, unit * 1500)
    pickle.dumps(facts)
    assert max((name.count(".") for name, _ in facts.walk()), default=0) <= 20


def test_tags_of_jsdoc_are_sections() -> None:
    text = """/**
 * Load a basket, see {@link save}.
 *
 * @param {string} [name=tea] - its name
 * @param {(a: B) => {x: 1}} done called at the end
 * @returns {Promise<void>}
 * @throws {TypeError} if it has no name
 * @throws when the shop is closed
 * @deprecated
 * @public
 * @example
 * const a = load("tea");
 *
 * a.b();
 */
export function load(name, done) {}
const twice = x => 2 * x;
"""
    found = items(read_as("load.js", text))
    doc = parse(found["load"].doc)
    assert doc.summary == "Load a basket, see `save`."
    assert doc.body == "Deprecated."
    assert doc.fields == [
        ("param", "name", "string", "its name"),
        ("param", "done", "(a: B) => {x: 1}", "called at the end"),
        ("returns", "", "", "`Promise<void>`"),
        ("raises", "TypeError", "", "if it has no name\nwhen the shop is closed"),
    ]
    assert doc.texts == {"example": '```javascript\nconst a = load("tea");\n\na.b();\n```'}
    assert found["twice"].signature == "const twice = (x)"


def test_headings_and_code_in_comments_of_rust() -> None:
    text = """/// Load a basket.
///
/// # Examples
///
/// ```no_run
/// # use shop::load;
/// let a = load();
/// ```
///
/// # Panics
///
/// Never.
pub fn load() {}
"""
    doc = parse(items(read_as("load.rs", text))["load"].doc)
    assert doc.texts == {"examples": "```rust\nlet a = load();\n```"}
    assert markdown(doc.body, lambda code, shown="": code) == "**Panics**\n\nNever."


def test_methods_of_a_javascript_variable_and_comments_above_a_blank_line() -> None:
    text = """'use strict';

/**
 * Module dependencies.
 * @private
 */

var http = require('http');

/**
 * The response.
 */

var res = Object.create(http.ServerResponse.prototype);

/**
 * Set the status.
 */

res.status = function status(code) {};

// Not about it.

res.links = function (links) {};
"""
    facts = read_as("response.js", text)
    found = items(facts)
    assert facts.doc == ""
    assert [item.name for item in facts.items] == ["res"]
    assert found["res"].doc == "The response."
    assert found["res.status"].doc == "Set the status."
    assert found["res.links"].doc == ""


def test_code_in_comments_of_doxygen_and_go() -> None:
    text = "/**\n * @file a.cpp\n * @brief Makes tea.\n * @author Me\n */\n#include <v>\n\nint a;\n"
    assert read_as("a.cpp", text).doc == "Makes tea."
    text = "/**\n * @brief Brew.\n * @return cups\n * @code\n * brew(3);\n * @endcode\n */\nint brew();\n"
    assert parse(items(read_as("a.cpp", text))["brew"].doc).body == "```cpp\nbrew(3);\n```"
    text = "package a\n\n// Serve serves.\n//\n//\tServe(3)\nfunc Serve(n int) {}\n"
    assert items(read_as("a.go", text))["Serve"].doc == "Serve serves.\n\n\tServe(3)"
    assert items(read_as("a.rs", "/// See [`Cup`] of [`tea`](crate::tea).\nfn f() {}\n"))["f"].doc == (
        "See `Cup` of `tea`."
    )
