"""Documentation of every file of any repository: a site, or Markdown, with keyword indexes.

    repopages build path/to/checkout --out site/
    repopages find KEYWORD path/to/checkout
    repopages serve path/to/checkout

Files are parsed, never imported, so that a repository can be documented where its dependencies are missing.

`reading/` turns files into facts, `relations/` relates them, `pages/` turns them into Markdown, `site/` turns
Markdown into HTML. Each imports only those before it.
"""

__version__ = "0.1.0"
