"""Documentation of any Python package: a site with a page and a keyword index for each module.

    thinwire docs --build mypackage --out site/
    thinwire docs KEYWORD

Sources are parsed, never imported, so that a package can be documented where its dependencies are missing.
"""
