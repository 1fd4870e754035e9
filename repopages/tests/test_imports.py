"""Imports of every language lead to the files that its own tools would take."""

from pathlib import Path

import pytest
from test_relations import library, targets


def test_includes_are_relative_first_and_then_by_the_end_of_the_path(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "src/core/a.c": '#include "a.h"\n#include "../util/b.h"\n#include <lib/c.h>\n#include <stdio.h>\n'
            '#include "string.h"\n#include <vendor.h>\n#include "../../../etc/passwd"\nint f(void);\n',
            "src/core/a.h": "int f(void);\n",
            "src/util/b.h": "",
            "include/lib/c.h": "",
            "other/string.h": "",
            "other/a.h": "",
        },
    )
    assert targets(made, "src/core/a.c") == ["src/core/a.h", "src/util/b.h", "include/lib/c.h"]
    outside = made.outside("src/core/a.c")
    assert outside["standard library"] == ["stdio.h", "string.h"]
    assert "vendor.h" in outside["other packages"]
    assert dict(made.related("src/core/a.h"))["src/core/a.c"] == "its implementation"
    assert dict(made.related("src/core/a.c"))["src/core/a.h"] == "its header"


def test_scripts_are_found_by_extension_index_alias_and_package(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "app/main.ts": 'import { view } from "./view.js";\nimport x from "./parts";\n'
            'import y from "@/deep/z";\n'
            'import s from "@shop/core";\nimport t from "@shop/core/till";\nimport React from "react";\n'
            'import fs from "node:fs";\nimport p from "path";\nexport * from "./data.json";\n'
            'import n from "./no";\n',
            "app/view.ts": "export function view() {}\n",
            "app/parts/index.tsx": "",
            "app/data.json": "{}",
            "app/src/deep/z.ts": "",
            "app/tsconfig.json": '{ // hi\n"compilerOptions": {"paths": {"@/*": ["src/*"],}} }',
            "packages/core/package.json": '{"name": "@shop/core", "main": "dist/index.js"}',
            "packages/core/src/index.ts": "",
            "packages/core/src/till.ts": "",
            "broken/package.json": "{",
            "app/view.test.ts": 'import { view } from "./view";\n',
        },
    )
    assert targets(made, "app/main.ts") == [
        "app/view.ts",
        "app/parts/index.tsx",
        "app/src/deep/z.ts",
        "packages/core/src/index.ts",
        "packages/core/src/till.ts",
        "app/data.json",
    ]
    assert made.outside("app/main.ts") == {"standard library": ["fs", "path"], "other packages": ["react"]}
    assert [(use.path, use.how) for use in made.tests("app/view.ts")] == [
        ("app/view.test.ts", "is named after it")
    ]


def test_rust_modules_are_files_of_the_crate(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "Cargo.toml": "[workspace]\n",
            "cart/Cargo.toml": '[package]\nname = "cart-core"\n',
            "cart/src/lib.rs": "mod items;\nmod net;\nuse std::fmt;\nuse serde::de::Error;\n",
            "cart/src/items.rs": "use crate::net::tcp::Stream;\nuse super::net;\npub struct Item;\n",
            "cart/src/net/mod.rs": "pub mod tcp;\n",
            "cart/src/net/tcp.rs": "use super::super::items::Item;\npub struct Stream;\n",
            "shop/Cargo.toml": '[package]\nname = "shop"\n',
            "shop/src/main.rs": "use cart_core::items::Item;\nfn main() {}\n",
        },
    )
    assert targets(made, "cart/src/lib.rs") == ["cart/src/items.rs", "cart/src/net/mod.rs"]
    assert targets(made, "cart/src/items.rs") == ["cart/src/net/tcp.rs", "cart/src/net/mod.rs"]
    assert targets(made, "cart/src/net/mod.rs") == ["cart/src/net/tcp.rs"]
    assert targets(made, "cart/src/net/tcp.rs") == ["cart/src/items.rs"]
    assert targets(made, "shop/src/main.rs") == ["cart/src/items.rs"]
    assert made.outside("cart/src/lib.rs") == {"standard library": ["std"], "other packages": ["serde"]}


def test_go_packages_are_folders_and_names_choose_the_file(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "go.mod": "module example.org/shop\n\ngo 1.22\n",
            "main.go": 'package main\n\nimport (\n\t"fmt"\n\tt "example.org/shop/till"\n'
            '\t"github.com/x/y"\n)\n\n'
            "func main() { fmt.Println(t.Close(), y.Z) }\n",
            "till/close.go": "package till\n\nfunc Close() int { return 1 }\n",
            "till/open.go": "package till\n\nfunc Open() int { return 1 }\n",
            "till/open_test.go": "package till\n\nfunc TestIt(t *testing.T) { Open() }\n",
        },
    )
    assert targets(made, "main.go") == ["till/close.go"]
    assert made.outside("main.go") == {"standard library": ["fmt"], "other packages": ["github.com/x/y"]}
    assert [use.path for use in made.tests("till/open.go")] == ["till/open_test.go"]
    assert made.tests("till/close.go") == []


def test_shell_scripts_source_their_neighbours(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "bin/run.sh": '#!/bin/sh\n. ./lib.sh\nsource "$(dirname "$0")/more.sh"\n'
            '. "$HERE/util/log.sh"\n. $X\n',
            "bin/lib.sh": "",
            "bin/more.sh": "",
            "util/log.sh": "",
        },
    )
    assert targets(made, "bin/run.sh") == ["bin/lib.sh", "bin/more.sh", "util/log.sh"]


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("a.md", "docs/a.md"),
        ("a%20b.md#top", "docs/a b.md"),
        ("/src/x.py?plain=1", "src/x.py"),
        ("../src", "src"),
        ("a", "docs/a.md"),
        ("#here", None),
        ("mailto:x@example.org", None),
        ("file:///etc/passwd", None),
        ("../../../etc/passwd", None),
        ("//example.org/a.md", None),
        ("javascript:alert(1)", None),
        ("%00%ff", None),
        ("index.md", None),
    ],
)
def test_links_of_documents(tmp_path: Path, written: str, target: str | None) -> None:
    made = library(
        tmp_path,
        {"docs/index.md": f"# X\n\n[it](<{written}>)\n", "docs/a.md": "", "docs/a b.md": "", "src/x.py": ""},
    )
    assert [edge.target for edge in made.links("docs/index.md")] == ([target] if target else [])
