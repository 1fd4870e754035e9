"""Documentation of any Python package: a site with a page and a keyword index for each module.

    repopages build path/to/checkout --out site/
    repopages find KEYWORD path/to/checkout

Sources are parsed, never imported, so that a package can be documented where its dependencies are missing.

`reading/` turns a checkout into facts, `pages/` turns facts into Markdown, `site/` turns Markdown into HTML.
Each imports only those before it.
"""

__version__ = "0.1.0"
