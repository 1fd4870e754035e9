"""A repository whose files try to run, load, read or break something."""

import os
from pathlib import Path

README = """---
myst:
  gfm_only: false
  enable_extensions: [colon_fence, substitution, html_image, attrs_inline]
---

# Hostile <img src=x onerror=alert(1)> {{ 7*7 }} {% raw %}

```{include} /etc/passwd
```

```{literalinclude} /etc/passwd
```

```{eval-rst}
.. include:: /etc/passwd
.. raw:: html
   :file: /etc/passwd
```

```{raw} html
<script>alert("raw")</script>
```

:::{include} /etc/passwd
:::

{download}`/etc/passwd` {{ key }}

<script>alert("script")</script>
<style>body { display: none }</style>
<iframe src="https://evil.invalid/frame"></iframe>
<object data="https://evil.invalid/o"></object><embed src="https://evil.invalid/e">
<svg onload="alert(2)"><a xlink:href="javascript:alert(3)"><text>x</text></a></svg>
<form action="https://evil.invalid/f"><input autofocus onfocus=alert(4)></form>
<meta http-equiv="refresh" content="0; url=https://evil.invalid/m"><base href="https://evil.invalid/">
<link rel="stylesheet" href="https://evil.invalid/c.css">
<div style="background: url(https://evil.invalid/b)" onmouseover="alert(6)">styled</div>
</div></article></div></body>

inline <img src="https://evil.invalid/p.png" alt="remote"> <b onclick=alert(7)>bold</b>
<a href="java&#9;script:alert(8)">tab</a> <a href=" javascript:alert(9)">space</a>

[js](javascript:alert(11)) [file](file:///etc/passwd) [data](data:text/html,x) [up](../../../etc/passwd)
![pic](https://evil.invalid/i.png) ![local](docs/pic.svg) ![up](../../../etc/passwd.png)
![secret](docs/secret.png) ![pipe](docs/pipe.png)

[good](docs/page.md#two) [code](src/a%20b%23.py#L2) [folder](src)

<details><summary>More</summary>

- item <div>unclosed

</details>

The end.[^1] ~~gone~~

[^1]: A note. <script>alert(16)</script>
"""

FILES = {
    "README.md": README,
    "docs/page.md": "# Page\n\n## Two\n\n[readme](../README.md) [self](page.md#two) [gone](gone.md)\n",
    "docs/deep.md": f"# Deep\n\n{'>' * 3000} x\n\n{'[' * 3000}{'*' * 3000}\n",
    "docs/empty.md": "",
    "docs/odd.md": '<h1 align="center">Odd</h1>\n\n#\n\n- [ ] \n\n---\n---\n\n[^a]\n\n```nosuch\nx\n```\n',
    "docs/pic.svg": '<svg xmlns="http://www.w3.org/2000/svg"><script>alert("svg")</script></svg>',
    "src/a b#.py": 'x = 1\n"""</pre><script>alert(99)</script> {{ 7*7 }}"""\n',
    "src/100%?.py": 'def percent():\n    """Do <script>alert(98)</script> [x](javascript:alert(97))."""\n',
    "src/ünï/index.md/x.c": "/* <script>alert(96)</script> */\nint f(void) { return 1; }\n",
    ".hidden/_sources/x.txt": "<script>alert(95)</script>\n",
}


def write_hostile(folder: Path) -> Path:
    """Write the repository, and return its folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "src" / "binary.bin").write_bytes(bytes(range(256)))
    (folder / "docs" / "secret.png").symlink_to("/etc/passwd")
    os.mkfifo(folder / "docs" / "pipe.png")
    (folder / os.fsdecode(b"src/no\xfftext.py")).write_text("def unnamed(): pass\n")
    return folder
